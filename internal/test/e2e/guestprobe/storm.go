//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// stormed says what a storm did.
type stormed struct {
	Opened  int64 `json:"opened"`  // connections that were accepted, or datagrams that were sent
	Refused int64 `json:"refused"` // connections that were not
	Ended   int64 `json:"ended"`   // connections that the other side ended before the storm was over
}

// storm loads a server with connections that ask for little and keep what they have.
//
//	storm silent COUNT SECONDS ADDR   open connections and send nothing
//	storm drip   COUNT SECONDS ADDR   send an HTTP head that never ends, a byte a second
//	storm burst  COUNT SECONDS ADDR   open and close connections, COUNT at a time
//	storm dns    COUNT SECONDS ADDR   send questions for names that do not exist, from COUNT sockets
func storm(args []string, out io.Writer) error {
	how, addr := args[0], args[3]
	n, err := numbers(args[1], args[2])
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(n[1])*time.Second)
	defer cancel()
	one, ok := map[string]func(context.Context, string, int, *stormed){"silent": silent, "drip": drip, "burst": burst, "dns": questions}[how]
	if !ok {
		return fmt.Errorf("%q: %w", how, errUsage)
	}
	var result stormed
	var wg sync.WaitGroup
	for i := range n[0] {
		wg.Go(func() { one(ctx, addr, i, &result) })
	}
	wg.Wait()
	return json.NewEncoder(out).Encode(result)
}

// open dials and counts what came of it.
func open(ctx context.Context, addr string, r *stormed) net.Conn {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		atomic.AddInt64(&r.Refused, 1)
		return nil
	}
	atomic.AddInt64(&r.Opened, 1)
	return c
}

// hold keeps a connection until the other side ends it or the storm is over.
func hold(ctx context.Context, c net.Conn, r *stormed) {
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if _, _ = io.Copy(io.Discard, c); ctx.Err() == nil {
		atomic.AddInt64(&r.Ended, 1)
	}
	_ = c.Close()
}

func silent(ctx context.Context, addr string, _ int, r *stormed) {
	if c := open(ctx, addr, r); c != nil {
		hold(ctx, c, r)
	}
}

func drip(ctx context.Context, addr string, _ int, r *stormed) {
	c := open(ctx, addr, r)
	if c == nil {
		return
	}
	go func() {
		text := "GET http://a.example.com/ HTTP/1.1\r\nHost: a.example.com\r\nX-Slow: "
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for i := 0; ; i++ {
			b := byte('x')
			if i < len(text) {
				b = text[i]
			}
			if _, err := c.Write([]byte{b}); err != nil {
				return
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	hold(ctx, c, r)
}

func burst(ctx context.Context, addr string, _ int, r *stormed) {
	for ctx.Err() == nil {
		if c := open(ctx, addr, r); c != nil {
			_ = c.Close()
		}
	}
}

func questions(ctx context.Context, addr string, i int, r *stormed) {
	c, err := (&net.Dialer{}).DialContext(ctx, "udp", addr)
	if err != nil {
		atomic.AddInt64(&r.Refused, 1)
		return
	}
	defer func() { _ = c.Close() }()
	for k := 0; ctx.Err() == nil; k++ {
		m := new(dns.Msg).SetQuestion(dns.Fqdn(fmt.Sprintf("n%d-%d.evil.example", i, k)), dns.TypeA)
		b, err := m.Pack()
		if err != nil {
			return
		}
		if _, err := c.Write(b); err == nil {
			atomic.AddInt64(&r.Opened, 1)
		}
	}
}
