package ca

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

func must[T any](t *testing.T) func(T, error) T {
	t.Helper()
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// TestChain: a guest of the project accepts the leaf of a host that the issuer may sign for, and no other certificate.
func TestChain(t *testing.T) {
	t.Parallel()
	now := time.Now()
	root, other := must[Authority](t)(NewRoot("prj_1", now)), must[Authority](t)(NewRoot("prj_2", now))
	issuer := must[Authority](t)(root.Issuer([]string{"api.example.com"}, now, now.Add(time.Hour)))
	leaves := must[*Leaves](t)(NewLeaves(issuer))
	check := func(name, asked string, trusted Authority, at time.Time) error {
		t.Helper()
		leaf := must[*x509.Certificate](t)(leafOf(leaves, name))
		roots, middle := x509.NewCertPool(), x509.NewCertPool()
		roots.AddCert(must[*x509.Certificate](t)(x509.ParseCertificate(trusted.Certificate)))
		middle.AddCert(must[*x509.Certificate](t)(x509.ParseCertificate(issuer.Certificate)))
		_, err := leaf.Verify(x509.VerifyOptions{DNSName: asked, Roots: roots, Intermediates: middle, CurrentTime: at})
		return err
	}
	if err := check("api.example.com", "api.example.com", root, now); err != nil {
		t.Errorf("the leaf of its host: %v", err)
	}
	for what, err := range map[string]error{
		"another host":       check("evil.example.com", "evil.example.com", root, now),
		"another name":       check("api.example.com", "evil.example.com", root, now),
		"an address":         check("203.0.113.7", "203.0.113.7", root, now),
		"another project":    check("api.example.com", "api.example.com", other, now),
		"after the issuer":   check("api.example.com", "api.example.com", root, now.Add(61*time.Minute)),
		"a CA of a leaf":     signedByLeaf(t, leaves, root, issuer),
		"a CA of the issuer": belowIssuer(t, issuer, root),
	} {
		if err == nil {
			t.Errorf("%s was taken", what)
		}
	}
}

func leafOf(l *Leaves, name string) (*x509.Certificate, error) {
	c, err := l.Of(name)
	if err != nil {
		return nil, err
	}
	return c.Leaf, nil
}

// signedByLeaf makes a leaf sign for a host.
func signedByLeaf(t *testing.T, l *Leaves, root, issuer Authority) error {
	t.Helper()
	leaf := must[*x509.Certificate](t)(leafOf(l, "api.example.com"))
	l.mu.Lock()
	key := l.leaves["api.example.com"].PrivateKey
	l.mu.Unlock()
	der := must[[]byte](t)(x509.MarshalPKCS8PrivateKey(key))
	return verifyBelow(t, Authority{leaf.Raw, der}, root, issuer)
}

// belowIssuer makes the issuer sign another authority.
func belowIssuer(t *testing.T, issuer, root Authority) error {
	t.Helper()
	below, err := issuer.Issuer([]string{"api.example.com"}, time.Now(), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return verifyBelow(t, below, root, issuer)
}

func verifyBelow(t *testing.T, a, root Authority, between ...Authority) error {
	t.Helper()
	leaf := must[*x509.Certificate](t)(leafOf(must[*Leaves](t)(NewLeaves(a)), "api.example.com"))
	roots, middle := x509.NewCertPool(), x509.NewCertPool()
	roots.AddCert(must[*x509.Certificate](t)(x509.ParseCertificate(root.Certificate)))
	for _, b := range append(between, a) {
		middle.AddCert(must[*x509.Certificate](t)(x509.ParseCertificate(b.Certificate)))
	}
	_, err := leaf.Verify(x509.VerifyOptions{DNSName: "api.example.com", Roots: roots, Intermediates: middle})
	return err
}

// TestLeavesAreFew: a host keeps one certificate until half of its lifetime is over; no certificate outlives its
// issuer.
func TestLeavesAreFew(t *testing.T) {
	t.Parallel()
	now := time.Now()
	root := must[Authority](t)(NewRoot("prj_1", now))
	leaves := must[*Leaves](t)(NewLeaves(must[Authority](t)(root.Issuer([]string{"a.example"}, now, now.Add(3*time.Hour)))))
	at := now
	leaves.now = func() time.Time { return at }
	first := must[*x509.Certificate](t)(leafOf(leaves, "a.example"))
	if again := must[*x509.Certificate](t)(leafOf(leaves, "a.example")); again != first {
		t.Error("a host got two certificates at once")
	}
	at = now.Add(LeafTime/2 + time.Minute)
	later := must[*x509.Certificate](t)(leafOf(leaves, "a.example"))
	if later == first || later.NotAfter.After(now.Add(3*time.Hour)) {
		t.Errorf("after half of its time: until %s", later.NotAfter)
	}
	at = now.Add(3 * time.Hour)
	if c, err := leaves.Of("a.example"); err == nil {
		t.Errorf("an expired issuer gave a certificate until %s", c.Leaf.NotAfter)
	}
}

func TestBadAuthorities(t *testing.T) {
	t.Parallel()
	now := time.Now()
	a, b := must[Authority](t)(NewRoot("prj_1", now)), must[Authority](t)(NewRoot("prj_1", now))
	for what, bad := range map[string]Authority{"empty": {}, "another's key": {a.Certificate, b.Key}, "no key": {a.Certificate, nil}} {
		if _, err := NewLeaves(bad); err == nil {
			t.Errorf("%s was taken", what)
		}
	}
	if _, err := a.Issuer(nil, now, now.Add(time.Hour)); core.CategoryOf(err) != core.Invalid {
		t.Errorf("an issuer of everything: %v", err)
	}
}
