package grant

import (
	"bytes"
	"encoding/json"
	"time"

	"github.com/coppice-dev/coppice/egress/policy"
)

// MaxBundle bounds the grants of a sandbox, in bytes of [Size]. With grants within MaxBundle and allowed rules within
// policy.MaxBytes, the rules of a sandbox always fit into runnerapi.MaxEgressRules.
const MaxBundle = 88 << 10

// ReservedSecret is the least size that is reserved for a secret from an external source, in bytes of [Secret.Size],
// because it may change there.
const ReservedSecret = 2 << 10

// marshal encodes without the escapes that JSON in a web page needs: those turn one byte into six.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// Size is the number of bytes that a secret takes in a bundle. It is at most twice the secret's length.
func (s Secret) Size() int {
	b, err := marshal(s.value)
	if err != nil {
		return 2 * len(s.value) // does not happen: every string can be encoded
	}
	return len(b) - 2 // without the quotes
}

// The overhead of a grant in addition to its own text, in bytes.
const (
	otherSize = 128 // its expiry, its budgets and the separator between two grants
	hostSize  = 24  // for each host: its name in the issuer's constraints, and its entry among the held hosts
)

// anyPlaceholder has the length of every placeholder.
var anyPlaceholder = NewPlaceholder()

// Size is the maximum number of bytes that a grant takes in the message for its sandbox, with a secret of a given size.
// It changes only when the grant changes.
func Size(g Grant, secret int) int {
	w := wireOf(g)
	w.Secret, w.Expires, w.MaxBytes, w.PerMinute, w.Placeholder = "", time.Time{}, 0, 0, anyPlaceholder
	b, err := marshal(w)
	if err != nil {
		return MaxBundle + 1 // a grant that cannot be encoded cannot be sent
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
