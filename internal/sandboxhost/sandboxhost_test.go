package sandboxhost_test

import (
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

const id = "0123456789abcdefghjkmnpqrs"

func TestDecode(t *testing.T) {
	t.Parallel()
	for host, want := range map[string]int{
		"3000-" + id + ".preview.example":       3000,
		"3000-" + id + ".preview.example:8443":  3000,
		"3000-" + id + ".PREVIEW.example.":      3000,
		"65535-" + id + ".preview.example":      65535,
		"65536-" + id + ".preview.example":      0,
		"0-" + id + ".preview.example":          0,
		"03000-" + id + ".preview.example":      0,
		"+3000-" + id + ".preview.example":      0,
		"3000_" + id + ".preview.example":       0,
		"3000-" + id + "x.preview.example":      0,
		"3000-" + id[1:] + ".preview.example":   0,
		"3000--" + id + ".preview.example":      0,
		"a.3000-" + id + ".preview.example":     0,
		"3000-" + id + ".a.preview.example":     0,
		"3000-" + id + ".evilpreview.example":   0,
		"3000-" + id + ".preview.example.evil":  0,
		"3000-" + id + "\x00.preview.example":   0,
		"3000-" + id + "\n.preview.example":     0,
		"3000-" + id + ".preview.example..":     0,
		"3000-" + id + ".preview.example@evil":  0,
		"3000-" + id:                            0,
		"preview.example":                       0,
		"":                                      0,
		strings.Repeat("a", 1<<16) + ".example": 0,
	} {
		got, ok := sandboxhost.Decode(host, "preview.example")
		if got.Port != want || ok != (want != 0) || ok && got.ID != id {
			t.Errorf("%q: %+v, %t", host, got, ok)
		}
	}
	if got, ok := sandboxhost.Decode("80-"+id+".any.example", ""); !ok || got.Port != 80 {
		t.Errorf("any domain: %+v, %t", got, ok)
	}
}

func TestBare(t *testing.T) {
	t.Parallel()
	for host, want := range map[string]bool{
		"127.0.0.1": true, "127.0.0.1:7076": true, "[::1]:7076": true, "localhost:1": true, "preview.example": true, "sandbox.preview.example": true,
		"evil.example": false, "other.preview.example": false, "localhost.evil.example": false, "": false,
	} {
		if got := sandboxhost.Bare(host, "preview.example"); got != want {
			t.Errorf("%q: %t", host, got)
		}
	}
}

// FuzzDecode: a name that is accepted is one label before the domain, and its target has this name.
func FuzzDecode(f *testing.F) {
	for _, host := range []string{"3000-" + id + ".preview.example", "3000-" + id + ".preview.example:80", "1-" + id + ".PREVIEW.example.", "[::1]:80", "-.", "3000-.preview.example"} {
		f.Add(host)
	}
	f.Fuzz(func(t *testing.T, host string) {
		const domain = "preview.example"
		got, ok := sandboxhost.Decode(host, domain)
		if !ok {
			return
		}
		if got.Port < 1 || got.Port > 65535 || sandboxhost.Name(host) != got.Host(domain) || sandboxhost.Bare(host, domain) {
			t.Errorf("%q: %+v", host, got)
		}
		if again, ok := sandboxhost.Decode(got.Host(domain), domain); !ok || again != got {
			t.Errorf("%q: %+v, then %+v", host, got, again)
		}
	})
}
