package resolver

import (
	"context"
	"net"
	"os"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// The bounds of what a sandbox has name servers do.
const (
	maxRelayed     = 32              // questions under way; further questions get no answer
	maxNameServers = 3               // that are asked for one question, as in resolv.conf(5)
	relayTime      = 3 * time.Second // for one server
	udpSize        = 1232            // of an answer over UDP that is asked for; longer ones come over TCP
)

// relay asks name servers on behalf of one sandbox.
type relay struct {
	servers func() []string
	room    chan struct{}
	ctx     context.Context //nolint:containedctx // ends with the resolver
	stop    context.CancelFunc
}

func newRelay(servers func() []string) *relay {
	r := &relay{servers: servers, room: make(chan struct{}, maxRelayed)}
	r.ctx, r.stop = context.WithCancel(context.Background())
	return r
}

// answer passes a question on by the network it came by. It returns no message if there is no room.
func (r *relay) answer(q *dns.Msg, network string) (*dns.Msg, Answer) {
	m := new(dns.Msg)
	if q.Opcode != dns.OpcodeQuery || len(q.Question) != 1 || q.Response {
		m.SetRcode(q, dns.RcodeNotImplemented)
		return m, Refused
	}
	asked := q.Question[0]
	if asked.Qclass != dns.ClassINET || asked.Qtype == dns.TypeAXFR || asked.Qtype == dns.TypeIXFR { // a whole zone is for other name servers
		m.SetRcode(q, dns.RcodeRefused)
		return m, Refused
	}
	select {
	case r.room <- struct{}{}:
		defer func() { <-r.room }()
	default:
		return nil, Limited
	}
	got := r.ask(q, network)
	if got == nil {
		m.SetRcode(q, dns.RcodeServerFailure)
		m.RecursionAvailable = true
		return m, Failed
	}
	got.Id = q.Id
	if network == "udp" {
		got.Truncate(sizeFor(q))
	}
	return got, Relayed
}

// sizeFor is the largest answer over UDP that the client accepts.
func sizeFor(q *dns.Msg) int {
	if opt := q.IsEdns0(); opt != nil {
		return max(dns.MinMsgSize, min(int(opt.UDPSize()), udpSize))
	}
	return dns.MinMsgSize
}

// ask returns the answer of the first name server that gives one; nil: none does.
func (r *relay) ask(q *dns.Msg, network string) *dns.Msg {
	out := new(dns.Msg)
	out.Id = dns.Id()
	out.Question = []dns.Question{q.Question[0]}
	out.RecursionDesired, out.CheckingDisabled, out.AuthenticatedData = q.RecursionDesired, q.CheckingDisabled, q.AuthenticatedData
	if opt := q.IsEdns0(); opt != nil {
		out.SetEdns0(udpSize, opt.Do())
	}
	servers := r.servers()
	client := dns.Client{Net: network, Timeout: relayTime, UDPSize: udpSize}
	for _, server := range servers[:min(len(servers), maxNameServers)] {
		got, _, err := client.ExchangeContext(r.ctx, out, server)
		if err == nil && got.Rcode != dns.RcodeServerFailure && got.Rcode != dns.RcodeRefused {
			return got
		}
		if r.ctx.Err() != nil {
			break
		}
	}
	return nil
}

// HostServers returns a function that lists the name servers in a file of the form of resolv.conf(5). It reads the file again when that has
// changed, and looks at it once a second at most. Where the file names none, it is the server of this host, as for other programs.
func HostServers(path string) func() []string {
	var (
		mu      sync.Mutex
		looked  time.Time
		written time.Time
		servers []string
	)
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		if servers != nil && time.Since(looked) < time.Second {
			return servers
		}
		looked = time.Now()
		info, err := os.Stat(path)
		if err == nil && servers != nil && info.ModTime().Equal(written) {
			return servers
		}
		servers = []string{"127.0.0.1:53"}
		if err != nil {
			return servers
		}
		written = info.ModTime()
		if conf, err := dns.ClientConfigFromFile(path); err == nil && len(conf.Servers) > 0 {
			servers = servers[:0]
			for _, s := range conf.Servers[:min(len(conf.Servers), maxNameServers)] {
				servers = append(servers, net.JoinHostPort(s, "53"))
			}
		}
		return servers
	}
}
