package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

var families = map[family]nftables.TableFamily{
	familyNetdev: nftables.TableFamilyNetdev,
	familyInet:   nftables.TableFamilyINet,
}

var hooks = map[string]*nftables.ChainHook{
	"ingress":     nftables.ChainHookIngress,
	"prerouting":  nftables.ChainHookPrerouting,
	"input":       nftables.ChainHookInput,
	"forward":     nftables.ChainHookForward,
	"output":      nftables.ChainHookOutput,
	"postrouting": nftables.ChainHookPostrouting,
}

func (t table) kernel() *nftables.Table {
	return &nftables.Table{Family: families[t.family], Name: t.name}
}

func (c chain) kernel(t *nftables.Table) *nftables.Chain {
	out := &nftables.Chain{Name: c.name, Table: t}
	if c.hook != "" {
		policy := nftables.ChainPolicyDrop
		if c.policy == accept {
			policy = nftables.ChainPolicyAccept
		}
		out.Type = nftables.ChainType(c.kind)
		out.Hooknum = hooks[c.hook]
		out.Priority = new(nftables.ChainPriority(c.priority))
		out.Policy = &policy
		out.Device = c.device
	}
	return out
}

func (r rule) kernel(f family, t *nftables.Table, c *nftables.Chain) *nftables.Rule {
	out := &nftables.Rule{Table: t, Chain: c, Exprs: r.exprs(f)}
	if r.comment != "" {
		out.UserData = userdata.AppendString(nil, userdata.TypeComment, r.comment)
	}
	return out
}

// replaceRules turns the tables of before into those of after in one batch: tables that both have keep their
// chains, and their counters' values, and get new rules. before must be what is in the kernel.
func replaceRules(c *nftables.Conn, before, after ruleset) error {
	for _, t := range before {
		if !after.has(t) {
			c.DelTable(t.kernel())
		}
	}
	for _, t := range after {
		kt := t.kernel()
		if before.has(t) {
			c.FlushTable(kt)
		} else {
			c.AddTable(kt)
			for _, name := range t.counters {
				c.AddObj(&nftables.CounterObj{Table: kt, Name: name})
			}
			for _, ch := range t.chains {
				c.AddChain(ch.kernel(kt))
			}
		}
		for _, ch := range t.chains {
			kc := ch.kernel(kt)
			for _, r := range ch.rules {
				c.AddRule(r.kernel(t.family, kt, kc))
			}
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("apply rules: %w", err)
	}
	return nil
}

func (rs ruleset) has(t table) bool {
	return slices.ContainsFunc(rs, func(o table) bool { return o.family == t.family && o.name == t.name })
}

// compareTables reads back the tables of want and reports any difference in chains, policies and rules.
func compareTables(c *nftables.Conn, want ruleset) error {
	for _, t := range want {
		kt := t.kernel()
		chains, err := c.ListChainsOfTableFamily(kt.Family)
		if err != nil {
			return fmt.Errorf("list chains of %s %s: %w", t.family, t.name, err)
		}
		chains = slices.DeleteFunc(chains, func(k *nftables.Chain) bool { return k.Table.Name != t.name })
		if len(chains) != len(t.chains) {
			return fmt.Errorf("table %s %s has %d chains in the kernel, not %d", t.family, t.name, len(chains), len(t.chains))
		}
		for _, ch := range t.chains {
			at := slices.IndexFunc(chains, func(k *nftables.Chain) bool { return k.Name == ch.name })
			if at < 0 || !sameChain(chains[at], ch.kernel(kt)) {
				return fmt.Errorf("chain %s of table %s %s differs in the kernel or is gone", ch.name, t.family, t.name)
			}
			if err := compareRules(c, t, ch); err != nil {
				return err
			}
		}
	}
	return nil
}

func sameChain(got, want *nftables.Chain) bool {
	return got.Type == want.Type && reflect.DeepEqual(got.Hooknum, want.Hooknum) &&
		reflect.DeepEqual(got.Priority, want.Priority) && reflect.DeepEqual(got.Policy, want.Policy)
}

func compareRules(c *nftables.Conn, t table, ch chain) error {
	kt := t.kernel()
	kc := ch.kernel(kt)
	got, err := c.GetRules(kt, kc)
	if err != nil {
		return fmt.Errorf("read rules of chain %s: %w", ch.name, err)
	}
	if len(got) != len(ch.rules) {
		return fmt.Errorf("chain %s of table %s %s has %d rules in the kernel, not %d", ch.name, t.family, t.name, len(got), len(ch.rules))
	}
	for i, r := range ch.rules {
		want := r.kernel(t.family, kt, kc)
		if !reflect.DeepEqual(got[i].Exprs, want.Exprs) || string(got[i].UserData) != string(want.UserData) {
			return fmt.Errorf("rule %d of chain %s (%s) differs in the kernel", i, ch.name, r)
		}
	}
	return nil
}

// compareAll is compareTables for a namespace that must hold nothing but want.
func compareAll(c *nftables.Conn, want ruleset) error {
	tables, err := c.ListTables()
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	if len(tables) != len(want) {
		return fmt.Errorf("%d tables in the kernel, not %d", len(tables), len(want))
	}
	return compareTables(c, want)
}

// planIn reads the plan that the namespace's rules carry and checks that these are the plan's rules.
func planIn(c *nftables.Conn, like plan) (plan, error) {
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: tableMain}
	rules, err := c.GetRules(t, &nftables.Chain{Name: "forward", Table: t})
	if err != nil {
		return plan{}, fmt.Errorf("read the plan: %w", err)
	}
	if len(rules) == 0 {
		return plan{}, errors.New("the namespace's rules are gone")
	}
	comment, _ := userdata.GetString(rules[len(rules)-1].UserData, userdata.TypeComment)
	p, err := parsePlan(comment, like)
	if err != nil {
		return plan{}, err
	}
	if p.rate, err = rateIn(c); err != nil {
		return plan{}, err
	}
	return p, compareAll(c, rulesFor(p))
}

// rateIn reads the rate that the namespace's rules keep: none where an older runner made them. Whether the rules are those of the rate is
// not looked at.
func rateIn(c *nftables.Conn) (Rate, error) {
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyNetdev)
	if err != nil {
		return Rate{}, fmt.Errorf("list tables: %w", err)
	}
	at := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == tableRate })
	if at < 0 {
		return Rate{}, nil
	}
	rules, err := c.GetRules(tables[at], &nftables.Chain{Name: "ingress", Table: tables[at]})
	if err != nil {
		return Rate{}, fmt.Errorf("read the rate: %w", err)
	}
	var r Rate
	for _, rule := range rules {
		for _, e := range rule.Exprs {
			limit, ok := e.(*expr.Limit)
			switch {
			case !ok:
			case limit.Type == expr.LimitTypePktBytes:
				r.Bytes = int64(min(limit.Rate, math.MaxInt64))
			default:
				r.Packets = int(min(limit.Rate, math.MaxInt32))
			}
		}
	}
	return r, nil
}

// countersIn reads the named counters of the tables, in packets; one name in two tables is added up.
func countersIn(c *nftables.Conn, tables ruleset) (map[string]uint64, error) {
	out := map[string]uint64{}
	for _, t := range tables {
		objs, err := c.GetObjects(t.kernel())
		if err != nil {
			return nil, fmt.Errorf("read counters of %s %s: %w", t.family, t.name, err)
		}
		for _, o := range objs {
			if counter, ok := o.(*nftables.CounterObj); ok {
				out[counter.Name] += counter.Packets
			}
		}
	}
	return out, nil
}

// exprs compiles the rule to what nft itself would send, with the implied conditions on the protocol.
func (r rule) exprs(f family) []expr.Any {
	var out []expr.Any
	for _, m := range r.match {
		out = append(out, compileMatch(f, m)...)
	}
	if r.counter != "" {
		out = append(out, &expr.Objref{Type: int(nftables.ObjTypeCounter), Name: r.counter})
	}
	switch r.verdict {
	case accept:
		out = append(out, &expr.Verdict{Kind: expr.VerdictAccept})
	case drop:
		out = append(out, &expr.Verdict{Kind: expr.VerdictDrop})
	case masquerade:
		out = append(out, &expr.Masq{})
	default:
		if to, ok := strings.CutPrefix(string(r.verdict), redirectTo); ok {
			return append(out, redirection(to)...)
		}
		out = append(out, &expr.Verdict{Kind: expr.VerdictJump, Chain: string(r.verdict[len("jump "):])})
	}
	return out
}

// redirection is what nft makes of a redirect to a port, and what the kernel shows of it.
func redirection(to string) []expr.Any {
	port, err := strconv.ParseUint(to, 10, 16)
	if err != nil {
		panic("netns: a redirect to port " + to)
	}
	const portSpecified = 2 // NF_NAT_RANGE_PROTO_SPECIFIED
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: be16(uint16(port))},
		&expr.Redir{RegisterProtoMin: 1, RegisterProtoMax: 1, Flags: portSpecified},
	}
}

// Offsets in bytes inside the Ethernet, IPv4, ARP (for IPv4 over Ethernet) and TCP headers.
const (
	offEtherSource = 6
	offEtherType   = 12
	offIPSource    = 12
	offIPDest      = 16
	offARPOp       = 6
	offARPSrcMAC   = 8
	offARPSrcIP    = 14
	offARPDstIP    = 24
	offPortDest    = 2 // of TCP and UDP
)

func compileMatch(f family, m match) []expr.Any {
	switch m := m.(type) {
	case etherSource:
		return append(impliesEther(), payload(expr.PayloadBaseLLHeader, offEtherSource, m.mac, m.not)...)
	case etherType:
		return append(impliesEther(), payload(expr.PayloadBaseLLHeader, offEtherType, be16(uint16(m)), false)...)
	case ipSource:
		return append(impliesIPv4(f), payload(expr.PayloadBaseNetworkHeader, offIPSource, m.ip.AsSlice(), m.not)...)
	case ipDest:
		return append(impliesIPv4(f), destPrefix(m)...)
	case arpSourceMAC:
		return append(impliesARP(), payload(expr.PayloadBaseNetworkHeader, offARPSrcMAC, m.mac, m.not)...)
	case arpSourceIP:
		return append(impliesARP(), payload(expr.PayloadBaseNetworkHeader, offARPSrcIP, m.ip.AsSlice(), m.not)...)
	case arpDestIP:
		return append(impliesARP(), payload(expr.PayloadBaseNetworkHeader, offARPDstIP, m.ip.AsSlice(), false)...)
	case arpRequest:
		return append(impliesARP(), payload(expr.PayloadBaseNetworkHeader, offARPOp, be16(1), false)...)
	case rateOver:
		kind := expr.LimitTypePkts
		if m.bytes {
			kind = expr.LimitTypePktBytes
		}
		return []expr.Any{&expr.Limit{Type: kind, Rate: m.perSecond, Over: true, Unit: expr.LimitTimeSecond, Burst: m.burst}}
	case inDevice:
		return meta(expr.MetaKeyIIFNAME, ifname(string(m)), false)
	case outDevice:
		return meta(expr.MetaKeyOIFNAME, ifname(m.name), m.not)
	case ctState:
		return []expr.Any{
			&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: host32(uint32(m)), Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		}
	case tcpDest:
		return append(meta(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_TCP}, false),
			payload(expr.PayloadBaseTransportHeader, offPortDest, be16(uint16(m)), false)...)
	case udpDest:
		return append(meta(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_UDP}, false),
			payload(expr.PayloadBaseTransportHeader, offPortDest, be16(uint16(m)), false)...)
	case overTCP:
		return meta(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_TCP}, false)
	case destLocal:
		return []expr.Any{
			&expr.Fib{Register: 1, ResultADDRTYPE: true, FlagDADDR: true},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: host32(unix.RTN_LOCAL)},
		}
	}
	panic(fmt.Sprintf("netns: no compilation for %T", m))
}

func payload(base expr.PayloadBase, offset uint32, data []byte, not bool) []expr.Any {
	return []expr.Any{
		&expr.Payload{OperationType: expr.PayloadLoad, DestRegister: 1, Base: base, Offset: offset, Len: uint32(len(data))},
		compare(data, not),
	}
}

func meta(key expr.MetaKey, data []byte, not bool) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, compare(data, not)}
}

func compare(data []byte, not bool) *expr.Cmp {
	if not {
		return &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: data}
	}
	return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data}
}

// impliesEther also makes a tap whose link type its holder changed (TUNSETLINK) match no rule that accepts.
func impliesEther() []expr.Any {
	return meta(expr.MetaKeyIIFTYPE, binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_ETHER), false)
}

func impliesIPv4(f family) []expr.Any {
	if f == familyInet {
		return meta(expr.MetaKeyNFPROTO, []byte{unix.NFPROTO_IPV4}, false)
	}
	return meta(expr.MetaKeyPROTOCOL, be16(unix.ETH_P_IP), false)
}

func impliesARP() []expr.Any { return meta(expr.MetaKeyPROTOCOL, be16(unix.ETH_P_ARP), false) }

func destPrefix(m ipDest) []expr.Any {
	addr := m.net.Masked().Addr().AsSlice()
	out := payload(expr.PayloadBaseNetworkHeader, offIPDest, addr, m.not)
	if m.net.IsSingleIP() {
		return out
	}
	mask := make([]byte, len(addr))
	for i := range m.net.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return slices.Insert(out, 1, expr.Any(&expr.Bitwise{
		SourceRegister: 1, DestRegister: 1, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask)),
	}))
}

func be16(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }

func host32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// ifname is an interface name as the kernel compares it: 16 bytes, padded with zeroes.
func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// unsupportedPolicy is the error for a policy that the rules do not know.
func unsupportedPolicy(p core.EgressPolicy) error {
	return core.Errorf(core.Invalid, core.CodeUnsupported, "network.egress_policy %q is not one of %q, %q and %q",
		core.Clip(string(p)), core.EgressDenyAll, core.EgressProxied, core.EgressAllowAll)
}
