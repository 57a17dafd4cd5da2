package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// TestBuckets takes from several buckets at once: all or none, and says when all will have one.
func TestBuckets(t *testing.T) {
	t.Parallel()
	l, now := newLimiter(Limits{}), time.Now()
	key, project := bucketKey{"key", RateRead}, bucketKey{"project", RateRead}
	rates := map[bucketKey]Rate{key: {10, 2}, project: {1, 3}, {"unlimited", RateRead}: {}}
	for left := 1; left >= 0; left-- {
		if got, err := l.take(now, rates); err != nil || got.Remaining != left || got.Limit != 2 {
			t.Errorf("%+v, %v", got, err)
		}
	}
	_, err := l.take(now, rates)
	if early, ok := err.(*RateError); !ok || early.After > 100*time.Millisecond || early.After < 99*time.Millisecond || core.CodeOf(err) != core.CodeRateLimited { //nolint:errorlint // it is not wrapped
		t.Errorf("%v", err)
	}
	now = now.Add(200 * time.Millisecond) // the key has two again; the refused one took nothing of the project's last
	if _, err := l.take(now, rates); err != nil {
		t.Error(err)
	}
	if _, err := l.take(now, rates); err == nil {
		t.Error("the project has none left")
	}
	l.sweep(now.Add(time.Second))
	if len(l.buckets) != 2 {
		t.Errorf("%d buckets: fresh ones are kept", len(l.buckets))
	}
	l.sweep(now.Add(time.Hour))
	if len(l.buckets) != 0 {
		t.Errorf("%d buckets are kept for ever", len(l.buckets))
	}
	for i := range maxBuckets + 10 {
		_, _ = l.take(now, map[bucketKey]Rate{{fmt.Sprint(i), RateOpen}: {1, 1}})
	}
	if len(l.buckets) > maxBuckets {
		t.Errorf("%d buckets", len(l.buckets))
	}
}

func TestOrigin(t *testing.T) {
	t.Parallel()
	for remote, want := range map[string]string{
		"10.0.0.1:80": "10.0.0.1", "[::ffff:10.0.0.1]:80": "10.0.0.1", "[2001:db8:1:2:3::4]:1": "2001:db8:1:2::/64", "[2001:db8:1:2:9::9]:2": "2001:db8:1:2::/64",
		"[fe80::1%eth0]:1": "fe80::/64", "@": "local", "": "local",
	} {
		if got := origin(remote); got != want {
			t.Errorf("origin of %q is %q, want %q", remote, got, want)
		}
	}
}

func TestSecretForm(t *testing.T) {
	t.Parallel()
	id := core.NewID[core.KeyID]()
	prefix, secret := newSecret(id)
	for s, want := range map[string]bool{
		secret: true, prefix: false, secret + "0": false, secret[:len(secret)-1]: false, prefix + "_": false, "cpk_": false, "": false, "own-form": true,
		string(make([]byte, maxSecret+1)): false,
	} {
		if wellFormed(s) != want {
			t.Errorf("%q: %v", s, !want)
		}
	}
}

// FuzzWellFormed takes whatever a client may send for a key.
func FuzzWellFormed(f *testing.F) {
	_, secret := newSecret(core.NewID[core.KeyID]())
	f.Add(secret)
	f.Add("cpk_x_y")
	f.Add("cpk_\x00_")
	f.Fuzz(func(t *testing.T, s string) {
		if wellFormed(s) && (s == "" || len(s) > maxSecret) {
			t.Errorf("%q passes", s)
		}
	})
}
