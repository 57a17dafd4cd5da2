package resolver

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/time/rate"

	"github.com/coppice-dev/coppice/egress/policy"
)

// Config describes the resolver of one sandbox.
type Config struct {
	Policy func() policy.Policy // returns the current policy; required, unless there is Servers
	// Servers returns the name servers to ask, as host:port, in this order. nil: the policy answers, and no server is asked.
	Servers func() []string
	Log     *slog.Logger // required
	// Rate bounds the questions in one second, default 200; further questions get no answer.
	Rate int
	// Count is called for each answered question, with the kind of answer; nil: not called.
	Count func(Answer)
}

// Answer is the kind of answer that a question got.
type Answer string

// The answers.
const (
	Given    Answer = "given"     // the name's address, or that the name has no record of that type
	NotFound Answer = "not_found" // the policy does not allow the name
	Refused  Answer = "refused"   // it was not a question for an address
	Limited  Answer = "limited"   // there were too many questions
	Relayed  Answer = "relayed"   // what a name server answered
	Failed   Answer = "failed"    // no name server answered
)

// TTL is the time for which a guest may cache an address. The address never changes; a short TTL lets programs notice
// sooner that a name is no longer allowed.
const TTL = 60 * time.Second

// Server is the resolver of one sandbox.
type Server struct {
	cfg   Config
	limit *rate.Limiter
	udp   *dns.Server
	tcp   *dns.Server
	wg    sync.WaitGroup
	relay *relay // nil: the policy answers
}

// Serve begins to answer on two sockets. The server owns them from now on.
func Serve(cfg Config, udp net.PacketConn, tcp net.Listener) *Server {
	if cfg.Rate == 0 {
		cfg.Rate = 200
	}
	s := &Server{cfg: cfg, limit: rate.NewLimiter(rate.Limit(cfg.Rate), cfg.Rate)}
	if cfg.Servers != nil {
		s.relay = newRelay(cfg.Servers)
	}
	const slow = 5 * time.Second
	s.udp = &dns.Server{PacketConn: udp, Handler: s, UDPSize: 1232}
	s.tcp = &dns.Server{Listener: &bounded{Listener: tcp, room: make(chan struct{}, 16)}, Handler: s, ReadTimeout: slow, WriteTimeout: slow, IdleTimeout: func() time.Duration { return slow }, MaxTCPQueries: 100}
	for _, d := range []*dns.Server{s.udp, s.tcp} {
		up := make(chan struct{})
		d.NotifyStartedFunc = func() { close(up) }
		s.wg.Go(func() {
			if err := d.ActivateAndServe(); err != nil && !errors.Is(err, net.ErrClosed) {
				cfg.Log.Error("the resolver of a sandbox has ended", "err", err)
			}
		})
		<-up // earlier it cannot be shut down
	}
	return s
}

// Close ends the server and closes its sockets.
func (s *Server) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if s.relay != nil {
		s.relay.stop()
	}
	err := errors.Join(s.udp.ShutdownContext(ctx), s.tcp.ShutdownContext(ctx))
	s.wg.Wait()
	return err
}

// ServeDNS implements dns.Handler.
func (s *Server) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	if !s.limit.Allow() {
		s.count(Limited)
		return
	}
	var m *dns.Msg
	var what Answer
	if s.relay != nil {
		m, what = s.relay.answer(q, w.RemoteAddr().Network())
	} else {
		m, what = answer(s.cfg.Policy(), q)
	}
	s.count(what)
	if m == nil {
		return
	}
	if err := w.WriteMsg(m); err != nil {
		s.cfg.Log.Debug("an answer was not sent", "err", err)
	}
}

func (s *Server) count(a Answer) {
	if s.cfg.Count != nil {
		s.cfg.Count(a)
	}
}

// answer returns the answer to a question. It is pure.
func answer(p policy.Policy, q *dns.Msg) (*dns.Msg, Answer) {
	m := new(dns.Msg)
	if q.Opcode != dns.OpcodeQuery || len(q.Question) != 1 || q.Response {
		m.SetRcode(q, dns.RcodeNotImplemented)
		return m, Refused
	}
	m.SetReply(q)
	m.RecursionAvailable = true
	asked := q.Question[0]
	switch asked.Qtype {
	case dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB:
	default:
		m.Rcode = dns.RcodeRefused
		return m, Refused
	}
	h, err := policy.ParseHost(asked.Name)
	if asked.Qclass != dns.ClassINET || err != nil || !p.Resolves(h) {
		m.Rcode = dns.RcodeNameError
		return m, NotFound
	}
	if asked.Qtype == dns.TypeA { // a name has no other records: no IPv6, and no keys for ECH
		m.Answer = []dns.RR{&dns.A{
			Hdr: dns.RR_Header{Name: asked.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: uint32(TTL / time.Second)},
			A:   Address(h).AsSlice(),
		}}
	}
	return m, Given
}

// bounded is a listener that bounds its open connections. It closes connections beyond the bound.
type bounded struct {
	net.Listener
	room chan struct{}
}

func (b *bounded) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case b.room <- struct{}{}:
			return &lodger{Conn: c, leave: sync.OnceFunc(func() { <-b.room })}, nil
		default:
			_ = c.Close()
		}
	}
}

type lodger struct {
	net.Conn
	leave func()
}

func (l *lodger) Close() error {
	l.leave()
	return l.Conn.Close()
}
