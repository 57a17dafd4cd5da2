package netns

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// verify checks that the calling thread's namespace, which is s, holds exactly what a quarantined one does; sockets
// are left to awaitNoSockets. It returns the first difference.
func (s *space) verify(ctx context.Context) error {
	for _, check := range []func() error{
		s.verifyLinks, verifyRoutes, verifyNeighbours, verifySysctls, verifyUntracked, s.verifyRules, s.verifyEmpty,
	} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := check(); err != nil {
			return fmt.Errorf("verify %s: %w", s.name, err)
		}
	}
	return nil
}

func (s *space) verifyLinks() error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	taps := 0
	for _, l := range links {
		a := l.Attrs()
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			return fmt.Errorf("list addresses of %s: %w", a.Name, err)
		}
		switch {
		case a.Flags&net.FlagUp != 0:
			return fmt.Errorf("%s is up", a.Name)
		case a.Name == TapName && l.Type() == "tuntap":
			taps++
			if a.HardwareAddr.String() != GatewayMAC {
				return fmt.Errorf("%s has the address %s", a.Name, a.HardwareAddr)
			}
			if len(addrs) != 1 || addrs[0].IPNet.String() != single(s.cfg.Gateway).String() {
				return fmt.Errorf("%s has the addresses %v, not %s", a.Name, addrs, s.cfg.Gateway)
			}
		case !isInborn(l):
			return fmt.Errorf("%s (%s) does not belong here", a.Name, l.Type())
		case len(addrs) != 0:
			return fmt.Errorf("%s has the addresses %v", a.Name, addrs)
		}
	}
	if taps != 1 {
		return fmt.Errorf("%s is missing", TapName)
	}
	return nil
}

// verifyRoutes allows what the kernel itself keeps in the table "local", and rules only as a new namespace has them.
func verifyRoutes() error {
	all := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, all, netlink.RT_FILTER_TABLE)
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if r.Table != unix.RT_TABLE_LOCAL {
			return fmt.Errorf("there is a route %s", r)
		}
	}
	rules, err := netlink.RuleList(netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("list routing rules: %w", err)
	}
	if len(rules) != 3 { // local, main, default
		return fmt.Errorf("there are %d routing rules, not 3", len(rules))
	}
	return nil
}

func verifyNeighbours() error {
	neighbours, err := netlink.NeighList(0, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("list neighbours: %w", err)
	}
	for _, n := range neighbours {
		if n.State != netlink.NUD_NOARP {
			return fmt.Errorf("there is a neighbour %s", n.IP)
		}
	}
	return nil
}

func verifySysctls() error {
	for _, s := range spaceSysctls {
		if err := s.check(); err != nil {
			return err
		}
	}
	return nil
}

// verifyUntracked checks that no connection is tracked.
func verifyUntracked() error { return sysctl{"netfilter/nf_conntrack_count", "0"}.check() }

// The kernel frees a closed netlink socket, such as those of this package, after an RCU grace period and tells nobody.
const (
	socketPatience = 2 * time.Second
	socketInterval = 2 * time.Millisecond
)

// awaitNoSockets waits until no socket but the space's own lives in the calling thread's namespace, which is s, not
// even one that the kernel keeps for a closed connection. A tap's descriptor counts as one. Sockets outlive their
// process when their descriptors were passed on, and their holder could reach the next guest through them.
func (s *space) awaitNoSockets(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, socketPatience)
	defer cancel()
	tick := time.NewTicker(socketInterval)
	defer tick.Stop()
	for {
		sockets, err := socketCounts()
		if err != nil || sockets == (socketCount{used: s.ownSockets()}) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("there are %d sockets of others and %d in TIME_WAIT", sockets.used-s.ownSockets(), sockets.timeWait)
		}
	}
}

type socketCount struct{ used, timeWait int }

// socketCounts reads how many sockets of any family the calling thread's namespace holds.
func socketCounts() (socketCount, error) {
	var out socketCount
	text, err := os.ReadFile("/proc/thread-self/net/sockstat")
	if err != nil {
		return out, fmt.Errorf("count sockets: %w", err)
	}
	found := 0
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		for i := 1; i+1 < len(fields); i += 2 {
			var into *int
			switch fields[0] + fields[i] {
			case "sockets:used":
				into = &out.used
			case "TCP:tw":
				into = &out.timeWait
			default:
				continue
			}
			if *into, err = strconv.Atoi(fields[i+1]); err != nil {
				return out, fmt.Errorf("count sockets: %w", err)
			}
			found++
		}
	}
	if found != 2 {
		return out, errors.New("count sockets: the kernel's answer has another form")
	}
	return out, nil
}

func (s *space) verifyRules() error {
	return s.tables(func(c *nftables.Conn) error {
		want := rulesFor(s.bare())
		if err := compareAll(c, want); err != nil {
			return err
		}
		counters, err := countersIn(c, want)
		if err != nil {
			return err
		}
		for name, packets := range counters {
			if packets != 0 {
				return fmt.Errorf("counter %s is %d", name, packets)
			}
		}
		return nil
	})
}

// verifyEmpty checks that no process is in the namespace.
func (s *space) verifyEmpty() error {
	var own unix.Stat_t
	if err := unix.Fstat(int(s.fd), &own); err != nil {
		return fmt.Errorf("stat namespace: %w", err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		var st unix.Stat_t
		err = unix.Stat("/proc/"+e.Name()+"/ns/net", &st)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH), errors.Is(err, unix.EACCES):
			continue // it ended meanwhile, or is a zombie or a kernel thread
		case err != nil:
			return fmt.Errorf("look at process %d: %w", pid, err)
		case st.Dev == own.Dev && st.Ino == own.Ino:
			return fmt.Errorf("process %d is still in it", pid)
		}
	}
	return nil
}
