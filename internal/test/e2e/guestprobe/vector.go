//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// vector is what a guest tries.
type vector struct {
	ID      string   `json:"id"`
	To      string   `json:"to"`   // host:port
	Send    [][]byte `json:"send"` // in segments of their own
	Connect bool     `json:"connect"`
	// Parts, joined, are one more segment: what is long is made in the guest.
	Parts []part `json:"parts,omitempty"`
	// Question is asked there instead, over UDP, as NAME TYPE.
	Name string `json:"name,omitempty"`
	Type uint16 `json:"type,omitempty"`
	TCP  bool   `json:"tcp,omitempty"`
}

// part is a text and how many times it is sent.
type part struct {
	Text  []byte `json:"text"`
	Times int    `json:"times"`
}

// answered is what came of it.
type answered struct {
	Got []byte `json:"got"` // the first of it; without the head that CONNECT was granted with
	End string `json:"end"`
	// Tunnel says that CONNECT was granted.
	Tunnel  bool     `json:"tunnel"`
	RCode   int      `json:"rcode"`
	Records []string `json:"records,omitempty"`
}

// How long a vector may take: a proxy waits for what does not come, and for names and addresses that do not answer.
const vectorPatience = 45 * time.Second

// say tries vectors, each of which is an argument, and prints what came of each.
func say(args []string, out io.Writer) error {
	results := make(map[string]answered, len(args))
	var mu sync.Mutex // guards results
	var wg sync.WaitGroup
	hands := make(chan struct{}, 32)
	for _, text := range args {
		var v vector
		if err := json.Unmarshal([]byte(text), &v); err != nil {
			return err
		}
		wg.Go(func() {
			hands <- struct{}{}
			a := v.try()
			<-hands
			mu.Lock()
			defer mu.Unlock()
			results[v.ID] = a
		})
	}
	wg.Wait()
	return json.NewEncoder(out).Encode(results)
}

func (v vector) try() (out answered) {
	if v.Name != "" {
		return v.ask()
	}
	c, err := (&net.Dialer{Timeout: vectorPatience}).DialContext(context.Background(), "tcp", v.To)
	if err != nil {
		out.End = outcome(err)
		return out
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(vectorPatience))
	send := v.Send
	if len(v.Parts) > 0 {
		var b []byte
		for _, p := range v.Parts {
			b = append(b, bytes.Repeat(p.Text, p.Times)...)
		}
		send = append(send, b)
	}
	for i, b := range send {
		if _, err := c.Write(b); err != nil {
			break // what came says why
		}
		if i > 0 || !v.Connect {
			continue
		}
		head, err := readHead(c)
		if err != nil || !bytes.HasPrefix(head, []byte("HTTP/1.1 200")) {
			out.Got, out.End = head, ended(err)
			return out
		}
		out.Tunnel = true
	}
	b := make([]byte, 1024)
	n, err := io.ReadAtLeast(c, b, 12) // a status line, an alert with its end, or the beginning of a ServerHello
	out.Got, out.End = b[:n], ended(err)
	return out
}

// readHead reads an answer's head.
func readHead(c net.Conn) ([]byte, error) {
	var head []byte
	for b := make([]byte, 1); !bytes.HasSuffix(head, []byte("\r\n\r\n")); {
		n, err := c.Read(b)
		if head = append(head, b[:n]...); err != nil {
			return head, err
		}
	}
	return head, nil
}

func ended(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "eof"
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return "reset"
	}
	return outcome(err)
}

// ask asks a name server.
func (v vector) ask() (out answered) {
	m := new(dns.Msg).SetQuestion(v.Name, v.Type)
	c := &dns.Client{Timeout: patience}
	if v.TCP {
		c.Net = "tcp"
	}
	r, _, err := c.Exchange(m, v.To)
	if err != nil {
		out.End = outcome(err)
		return out
	}
	out.RCode = r.Rcode
	for _, rr := range r.Answer {
		out.Records = append(out.Records, rr.String())
	}
	return out
}
