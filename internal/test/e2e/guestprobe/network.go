//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// How long a packet may take that nothing drops: there is nothing but this host between two sandboxes.
const patience = 2 * time.Second

// reach tries every target at once and prints what became of each. A target is tcp:ADDR:PORT, udp:ADDR:PORT, icmp:ADDR or
// raw:ADDR (an IPv4 packet with a header of our own making), or forged:SOURCE>ADDR. Addresses of IPv6 have no brackets but with a port. Sent is not received: whether it arrived is for the other side to
// say, unless it answers ("refused", "answered", "hung up").
func reach(args []string, out io.Writer) error {
	results := make(map[string]string, len(args))
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, target := range args {
		wg.Go(func() {
			r := tryTarget(target)
			mu.Lock()
			defer mu.Unlock()
			results[target] = r
		})
	}
	wg.Wait()
	return json.NewEncoder(out).Encode(results)
}

func tryTarget(target string) string {
	kind, address, _ := strings.Cut(target, ":")
	switch kind {
	case "tcp":
		c, err := (&net.Dialer{Timeout: patience}).DialContext(context.Background(), "tcp", address)
		if err != nil {
			return outcome(err)
		}
		defer func() { _ = c.Close() }()
		return greet(c)
	case "udp":
		return tryUDP(address)
	case "icmp":
		return tryICMP(address)
	case "raw":
		return tryRaw("0.0.0.0", address) // the kernel fills it in
	case "forged":
		src, dst, _ := strings.Cut(address, ">")
		return tryRaw(src, dst)
	}
	return "unknown kind"
}

// greet says something that is no protocol's, and tells what came of it.
func greet(c net.Conn) string {
	_, err := io.WriteString(c, "hello\n")
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if err == nil {
		_, err = c.Read(make([]byte, 64))
	}
	switch {
	case err == nil:
		return "answered"
	case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return "hung up"
	}
	return outcome(err)
}

func outcome(err error) string {
	var timeout net.Error
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return "refused"
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return "no route"
	case errors.As(err, &timeout) && timeout.Timeout():
		return "silence"
	}
	return err.Error()
}

func tryUDP(address string) string {
	c, err := (&net.Dialer{}).DialContext(context.Background(), "udp", address)
	if err != nil {
		return outcome(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := io.WriteString(c, "hello"); err != nil {
		return outcome(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if _, err := c.Read(make([]byte, 64)); err != nil {
		return outcome(err)
	}
	return "answered"
}

func tryICMP(address string) string {
	network, kind := "ip4:icmp", byte(8)
	if strings.Contains(address, ":") {
		network, kind = "ip6:ipv6-icmp", 128 // the kernel sums it up
	}
	c, err := (&net.Dialer{}).DialContext(context.Background(), network, address)
	if err != nil {
		return outcome(err)
	}
	defer func() { _ = c.Close() }()
	echo := []byte{kind, 0, 0, 0, 0, 1, 0, 1}
	sum := checksum(echo)
	echo[2], echo[3] = byte(sum>>8), byte(sum)
	if _, err := c.Write(echo); err != nil {
		return outcome(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	return answerFrom(c.(*net.IPConn), address)
}

// answerFrom waits for a message of the address. Before a raw socket is connected it takes everybody's, and the kernel gives a
// guest its own echo request to 255.255.255.255 back: that is nobody's answer.
func answerFrom(c *net.IPConn, address string) string {
	bare, _, _ := strings.Cut(address, "%")
	for b := make([]byte, 256); ; {
		_, from, err := c.ReadFromIP(b)
		if err != nil {
			return outcome(err)
		}
		if from.IP.Equal(net.ParseIP(bare)) {
			return fmt.Sprintf("answered with type %d", b[0])
		}
	}
}

// tryRaw sends a UDP packet whose IP header is ours. In IPv6 a header of our own must come from an address that we have.
func tryRaw(source, address string) string {
	dst, err := netip.ParseAddr(address)
	if err != nil {
		return err.Error()
	}
	src, err := netip.ParseAddr(source)
	if err != nil {
		return err.Error()
	}
	if dst.Is6() {
		return "no route" // flood sends such frames
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Sendto(fd, udpPacket(src, dst), 0, &unix.SockaddrInet4{Addr: dst.As4()}); err != nil {
		return outcome(err)
	}
	return "sent"
}

func udpPacket(src, dst netip.Addr) []byte {
	payload := []byte("hello")
	p := make([]byte, 28, 28+len(payload))
	p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP
	p[3] = byte(28 + len(payload))
	s, d := src.As4(), dst.As4()
	copy(p[12:], s[:])
	copy(p[16:], d[:])
	sum := checksum(p[:20])
	p[10], p[11] = byte(sum>>8), byte(sum)
	p[21], p[23], p[25] = 9, 9, byte(8+len(payload))
	return append(p, payload...)
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum) // folded above
}

// flood sends frames through every link that has a MAC for so many seconds: ARP, IPv4, IPv6, RARP, from the link's own address
// and from a forged one, to everybody. It prints how many frames the kernel took.
func flood(args []string, out io.Writer) error {
	n, err := numbers(args[0])
	if err != nil {
		return err
	}
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	sent := 0
	for end := time.Now().Add(time.Duration(n[0]) * time.Second); time.Now().Before(end); {
		for _, l := range links {
			if len(l.HardwareAddr) != 6 {
				continue
			}
			for _, frame := range frames(l.HardwareAddr) {
				if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: l.Index, Halen: 6}); err == nil {
					sent++
				}
			}
		}
		<-time.After(time.Millisecond)
	}
	_, err = fmt.Fprintln(out, sent)
	return err
}

func frames(own net.HardwareAddr) [][]byte {
	forged := net.HardwareAddr{0x02, 0xbb, 0xbb, 0xbb, 0xbb, 0xbb}
	broadcast := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	ip := udpPacket(netip.MustParseAddr("10.83.1.1"), netip.MustParseAddr("10.83.0.1"))
	const lldp = 0x88cc
	var out [][]byte
	for _, src := range []net.HardwareAddr{own, forged} {
		for _, kind := range []uint16{unix.ETH_P_IP, unix.ETH_P_ARP, unix.ETH_P_RARP, unix.ETH_P_IPV6, unix.ETH_P_8021Q, lldp} {
			f := append(append([]byte{}, broadcast...), src...)
			f = append(f, byte(kind>>8), byte(kind))
			out = append(out, append(f, ip...))
		}
		for _, to := range []string{"169.254.169.254", "203.0.113.1", "255.255.255.255", "224.0.0.251"} { // from somebody else
			f := append(append([]byte{}, broadcast...), src...)
			f = append(f, unix.ETH_P_IP>>8, unix.ETH_P_IP&0xff)
			out = append(out, append(f, udpPacket(netip.MustParseAddr("10.9.8.7"), netip.MustParseAddr(to))...))
		}
		out = append(out, routerAdvertisement(src))
	}
	return out
}

// routerAdvertisement is a frame that makes whoever believes it send its IPv6 here.
func routerAdvertisement(src net.HardwareAddr) []byte {
	from, to := netip.MustParseAddr("fe80::bb").As16(), netip.MustParseAddr("ff02::1").As16()
	ra := []byte{134, 0, 0, 0, 64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0}
	pseudo := append(append(append([]byte{}, from[:]...), to[:]...), 0, 0, 0, byte(len(ra)), 0, 0, 0, unix.IPPROTO_ICMPV6)
	sum := checksum(append(pseudo, ra...))
	ra[2], ra[3] = byte(sum>>8), byte(sum)
	f := append([]byte{0x33, 0x33, 0, 0, 0, 1}, src...)
	f = append(f, unix.ETH_P_IPV6>>8, unix.ETH_P_IPV6&0xff, 0x60, 0, 0, 0, 0, byte(len(ra)), unix.IPPROTO_ICMPV6, 255)
	return append(append(append(f, from[:]...), to[:]...), ra...)
}

// listen takes TCP connections and UDP packets on a port, and notes the address of each sender in OUT.
func listen(args []string, _ io.Writer) error {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp4", ":"+args[0])
	if err != nil {
		return err
	}
	u, err := (&net.ListenConfig{}).ListenPacket(context.Background(), "udp4", ":"+args[0])
	if err != nil {
		return err
	}
	var mu sync.Mutex
	seen := []string{}
	note := func(kind string, from net.Addr) error {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, kind+" "+from.String())
		return publish(args[1], seen)
	}
	if err := publish(args[1], seen); err != nil {
		return err
	}
	failed := make(chan error, 2)
	go func() {
		for {
			c, err := l.Accept()
			if err == nil {
				err = errors.Join(note("tcp", c.RemoteAddr()), c.Close())
			}
			if err != nil {
				failed <- err
				return
			}
		}
	}()
	go func() {
		b := make([]byte, 2048)
		for {
			_, from, err := u.ReadFrom(b)
			if err == nil {
				err = note("udp", from)
			}
			if err != nil {
				failed <- err
				return
			}
		}
	}()
	err = <-failed
	fmt.Fprintln(os.Stderr, "listen:", err)
	return err
}
