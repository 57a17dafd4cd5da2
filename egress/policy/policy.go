package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// MaxRules and MaxBytes bound a policy: the number of its entries, and their bytes as JSON. MaxBytes holds for new
// policies only: [Parse] also reads stored policies from the time before this bound.
const (
	MaxRules = 256
	MaxBytes = 32 << 10
)

// Policy says what a sandbox may reach. The zero Policy denies everything. It is immutable.
type Policy struct {
	entries []string // in canonical form, sorted, without duplicates
	rules   []entry
}

// entry is a rule with the text that the user knows: the rule's own text, or the bundle's.
type entry struct {
	rule Rule
	name string
}

// Parse reads a policy from its entries. The error names every wrong entry; field is the name of the list in the
// request.
func Parse(field string, allow []string) (Policy, error) {
	if len(allow) > MaxRules {
		return Policy{}, core.Errorf(core.Invalid, core.CodeInvalidField, "%s has %d entries; the maximum is %d", field, len(allow), MaxRules)
	}
	var p Policy
	var errs []string
	for i, text := range allow {
		name, rules, err := parseEntry(text)
		if err != nil {
			errs = append(errs, fmt.Sprintf("%s[%d]: %s", field, i, message(err)))
			continue
		}
		if slices.Contains(p.entries, name) {
			continue
		}
		p.entries = append(p.entries, name)
		for _, r := range rules {
			p.rules = append(p.rules, entry{r, name})
		}
	}
	if errs != nil {
		return Policy{}, core.Errorf(core.Invalid, core.CodeInvalidField, "%s", strings.Join(errs, "; "))
	}
	slices.Sort(p.entries)
	return p, nil
}

// CheckSize refuses a policy that is too large to be sent together with grants.
func (p Policy) CheckSize(field string) error {
	if n := SizeOf(p.entries); n > MaxBytes {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "%s takes %d bytes as JSON, and the maximum is %d; leave out entries, or allow *.example.com for names below it", field, n, MaxBytes)
	}
	return nil
}

// SizeOf returns the number of bytes that entries take as JSON.
func SizeOf(entries []string) int {
	n := 2
	for _, e := range entries {
		n += len(e) + 3
	}
	return n
}

func message(err error) string {
	if e, ok := errors.AsType[*core.Error](err); ok {
		return e.Msg
	}
	return err.Error()
}

func parseEntry(text string) (name string, rules []Rule, err error) {
	if bundle, ok := strings.CutPrefix(text, bundlePrefix); ok {
		rules, err := parseBundle(bundle)
		return text, rules, err
	}
	r, err := parseRule(text)
	return r.String(), []Rule{r}, err
}

// Entries returns the policy's entries in canonical form, sorted. This form is stored, shown and given to runners.
func (p Policy) Entries() []string { return slices.Clone(p.entries) }

// Empty reports whether the policy allows nothing.
func (p Policy) Empty() bool { return len(p.rules) == 0 }

// Allows reports whether a host may be reached at a port with a protocol, and which entry allows it.
func (p Policy) Allows(h Host, port uint16, spoken core.Spoken) (by string, ok bool) {
	for _, e := range p.rules {
		if e.rule.allows(h, port, spoken == core.SpokenTCP) {
			return e.name, true
		}
	}
	return "", false
}

// Resolves reports whether the sandbox's resolver answers for a name: some rule must allow the name at some port.
func (p Policy) Resolves(h Host) bool {
	return h.name != "" && slices.ContainsFunc(p.rules, func(e entry) bool { return e.rule.covers(h) })
}

// Names returns the exact names that may be reached with any protocol at a port.
func (p Policy) Names(port uint16) []Host {
	var out []Host
	for _, e := range p.rules {
		if e.rule.TCP && e.rule.Port == port && e.rule.Host.name != "" {
			out = append(out, e.rule.Host)
		}
	}
	return out
}

// Beyond returns the entries that allow something that the other policy does not allow, in order. It returns none when
// this policy is the same or narrower.
func (p Policy) Beyond(other Policy) []string {
	var out []string
	for _, e := range p.rules {
		for _, port := range e.rule.ports() {
			within := slices.ContainsFunc(other.rules, func(o entry) bool { return e.rule.withinAt(port, o.rule) })
			if !within && !slices.Contains(out, e.name) {
				out = append(out, e.name)
			}
		}
	}
	slices.Sort(out)
	return out
}
