package hostport

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// The ports that the kernel gives to outgoing connections of the host. A forwarded port among them fails whenever a connection has it, and takes
// it from connections as long as it is open.
const (
	outgoingFile = "/proc/sys/net/ipv4/ip_local_port_range"
	reservedFile = "/proc/sys/net/ipv4/ip_local_reserved_ports"
)

// span is a range of ports. One whose last port is less than its first is empty.
type span struct{ first, last int }

// linuxOutgoing is what a kernel starts with.
var linuxOutgoing = span{32768, 60999}

// outgoing reads the ports of outgoing connections. Where they cannot be read, they are those of a kernel that nobody has configured.
func outgoing() span {
	b, err := os.ReadFile(outgoingFile)
	if err != nil {
		return linuxOutgoing
	}
	s, ok := parseOutgoing(string(b))
	if !ok {
		return linuxOutgoing
	}
	return s
}

func parseOutgoing(text string) (span, bool) {
	fields := strings.Fields(text)
	if len(fields) != 2 {
		return span{}, false
	}
	first, err1 := strconv.ParseUint(fields[0], 10, 16)
	last, err2 := strconv.ParseUint(fields[1], 10, 16)
	return span{int(first), int(last)}, err1 == nil && err2 == nil && first <= last
}

// outside returns the larger one of two ranges: the ports from Lowest up that are below those of
// outgoing connections, and the ports above them. If both ranges are empty, it returns all ports
// from Lowest up.
func outside(taken span) span {
	below, above := span{Lowest, min(taken.first-1, 65535)}, span{max(taken.last+1, Lowest), 65535}
	switch {
	case below.last < below.first && above.last < above.first:
		return span{Lowest, 65535}
	case above.last-above.first > below.last-below.first:
		return above
	}
	return below
}

// reserved reads which ports outgoing connections leave out, as in 8080,9148-9150.
func reserved(text string) map[int]bool {
	out := map[int]bool{}
	for part := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		low, high, isRange := strings.Cut(part, "-")
		first, err := strconv.ParseUint(low, 10, 16)
		last := first
		if err == nil && isRange {
			last, err = strconv.ParseUint(high, 10, 16)
		}
		if err != nil {
			continue
		}
		for port := first; port <= last; port++ {
			out[int(port)] = true
		}
	}
	return out
}

// shared counts the ports that tenants may forward and that the kernel gives to outgoing connections.
func (a Allowed) shared(taken span, kept map[int]bool) (n int) {
	for port := max(int(a.First), taken.first); port <= min(int(a.Last), taken.last); port++ {
		if !kept[port] {
			n++
		}
	}
	return n
}

// Warning says what is wrong with the range of ports on this host, and what to do. It is empty when nothing is.
func (a Allowed) Warning() string {
	a = a.withDefaults()
	taken := outgoing()
	text, _ := os.ReadFile(reservedFile) // without it, none is reserved
	n := a.shared(taken, reserved(string(text)))
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("%d of the ports %d-%d that tenants may forward are also for outgoing connections of this host (net.ipv4.ip_local_port_range is %d-%d): a forward fails while "+
		"a connection has its port; choose --forward-ports outside of that range, or reserve the ports in net.ipv4.ip_local_reserved_ports", n, a.First, a.Last, taken.first, taken.last)
}
