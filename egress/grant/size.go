package grant

import (
	"bytes"
	"encoding/json"
	"time"

	"github.com/coppice-dev/coppice/egress/policy"
)

// MaxBundle bounds the grants of a sandbox, in bytes of [Size]. With it, and with policy.MaxBytes of rules, the rules of a sandbox
// fit into runnerapi.MaxEgressRules, whatever is in them.
const MaxBundle = 88 << 10

// ReservedSecret is the least size of a secret that is kept elsewhere, in bytes of [Secret.Size], because it may change there.
const ReservedSecret = 2 << 10

// marshal encodes without the escapes that JSON in a web page needs: they make six bytes of one.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// Size is how many bytes a secret takes in a bundle. It is at most twice its length.
func (s Secret) Size() int {
	b, err := marshal(s.value)
	if err != nil {
		return 2 * len(s.value) // a string can always be encoded
	}
	return len(b) - 2 // quotes
}

// The overhead of a grant besides its own text, in bytes.
const (
	otherSize = 128 // its time, its budgets and what stands between two
	hostSize  = 24  // of a name among those that an issuer may speak for, and of the host among those that are held
)

// anyPlaceholder is as long as every placeholder.
var anyPlaceholder = NewPlaceholder()

// Size is how many bytes a grant takes, at most, of what is sent for its sandbox, with a secret of a size. It depends on nothing that
// changes without the grant.
func Size(g Grant, secret int) int {
	w := wireOf(g)
	w.Secret, w.Expires, w.MaxBytes, w.PerMinute, w.Placeholder = "", time.Time{}, 0, 0, anyPlaceholder
	b, err := marshal(w)
	if err != nil {
		return MaxBundle + 1 // what cannot be encoded cannot be sent
	}
	n := len(b) + secret + otherSize
	if g.Mode != ModeHeader {
		return n
	}
	for _, t := range g.Targets {
		n += len(t.Host.Name())*4/3 + hostSize + len(policy.JoinHostPort(t.Host, t.Port))
	}
	return n
}

// Fit chooses the grants to send when all together are too large. It leaves out grants whose secret has grown beyond its reserved size first,
// then the last ones. Grants that were admitted within the bound are always sent.
func Fit(grants []Grant, reserved []int) []bool {
	fit, sum := make([]bool, len(grants)), 0
	for _, grown := range []bool{false, true} {
		for i, g := range grants {
			size := g.Secret.Size()
			if (size > reserved[i]) != grown {
				continue
			}
			if n := Size(g, size); sum+n <= MaxBundle {
				fit[i], sum = true, sum+n
			}
		}
	}
	return fit
}
