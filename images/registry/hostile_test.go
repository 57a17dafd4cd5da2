package registry

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// shelf is a registry that serves what a test puts on it, true or not.
type shelf struct {
	t        *testing.T
	manifest []byte
	kind     string // of the manifest
	blobs    map[core.Digest][]byte
	front    func(http.ResponseWriter, *http.Request) bool
}

func (s *shelf) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, last, _ := strings.Cut(r.URL.Path, "/blobs/")
	switch {
	case s.front != nil && s.front(w, r):
	case r.URL.Path == "/v2/":
	case strings.Contains(r.URL.Path, "/manifests/"):
		w.Header().Set("Content-Type", s.kind)
		_, _ = w.Write(s.manifest)
	case s.blobs[core.Digest(last)] != nil:
		_, _ = w.Write(s.blobs[core.Digest(last)])
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

func (s *shelf) start(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(s)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return strings.TrimPrefix(server.URL, "http://")
}

func (s *shelf) add(b []byte) core.Digest {
	d := core.DigestOf(b)
	if s.blobs == nil {
		s.blobs = map[core.Digest][]byte{}
	}
	s.blobs[d] = b
	return d
}

type descriptor struct {
	MediaType string      `json:"mediaType"`
	Digest    core.Digest `json:"digest"`
	Size      int64       `json:"size"`
	URLs      []string    `json:"urls,omitempty"`
}

const (
	manifestKind = "application/vnd.oci.image.manifest.v1+json"
	configKind   = "application/vnd.oci.image.config.v1+json"
	layerKind    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

func encoded(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// honest puts an image with one layer on the shelf, and returns the parts of its manifest.
func (s *shelf) honest() (config descriptor, layers []descriptor) {
	s.t.Helper()
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	content := []byte(text(300_000))
	if _, err := w.Write(content); err != nil {
		s.t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		s.t.Fatal(err)
	}
	layers = []descriptor{{MediaType: layerKind, Digest: s.add(z.Bytes()), Size: int64(z.Len())}}
	config = s.config([]core.Digest{core.DigestOf(content)}, nil)
	s.set(config, layers)
	return config, layers
}

func (s *shelf) config(diffs []core.Digest, c map[string]any) descriptor {
	s.t.Helper()
	raw := encoded(s.t, map[string]any{"os": "linux", "architecture": "amd64", "config": c, "rootfs": map[string]any{"type": "layers", "diff_ids": diffs}})
	return descriptor{MediaType: configKind, Digest: s.add(raw), Size: int64(len(raw))}
}

func (s *shelf) set(config descriptor, layers []descriptor) {
	s.t.Helper()
	s.kind = manifestKind
	s.manifest = encoded(s.t, map[string]any{"schemaVersion": 2, "mediaType": manifestKind, "config": config, "layers": layers})
}

// TestHostileRegistry: whatever a registry answers, it is refused before it costs much, and no layer is kept.
func TestHostileRegistry(t *testing.T) {
	t.Parallel()
	var inner atomic.Int64
	secret := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { inner.Add(1) }))
	t.Cleanup(func() {
		secret.Close()
		if n := inner.Load(); n > 0 {
			t.Errorf("a server beside the registry was asked %d times", n)
		}
	})
	blobs := func(answer func(http.ResponseWriter, *http.Request)) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/blobs/") {
				return false
			}
			answer(w, r)
			return true
		}
	}
	redirect := func(to string) func(s *shelf) {
		return func(s *shelf) {
			s.honest()
			s.front = blobs(func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, to, http.StatusTemporaryRedirect) })
		}
	}
	endless := func(w http.ResponseWriter, _ *http.Request) {
		chunk := bytes.Repeat([]byte(" "), 1<<20)
		for range 64 {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}
	challenge := func(realm string) func(s *shelf) {
		return func(s *shelf) {
			s.honest()
			s.front = func(w http.ResponseWriter, _ *http.Request) bool {
				w.Header().Set("WWW-Authenticate", fmt.Sprintf("Bearer realm=%q,service=\"x\"", realm))
				w.WriteHeader(http.StatusUnauthorized)
				return true
			}
		}
	}
	for name, c := range map[string]struct {
		set  func(s *shelf)
		want core.Code
		text string
	}{
		"metadata service":         {redirect("https://169.254.169.254/latest/"), CodeRefused, "metadata"},
		"metadata service as IPv6": {redirect("https://[fd00:ec2::254]/latest/"), CodeRefused, "private"},
		"IPv4 written as IPv6":     {redirect("https://[::ffff:169.254.169.254]/"), CodeRefused, "metadata"},
		"loopback":                 {redirect(strings.Replace(secret.URL, "http", "https", 1)), CodeRefused, "loopback"},
		"loopback by name":         {redirect("https://localhost:1/"), CodeRefused, "loopback"},
		"a private address":        {redirect("https://10.0.0.1/"), CodeRefused, "private"},
		"without TLS":              {redirect("http://storage.example/"), CodeRefused, "TLS"},
		"another scheme":           {redirect("file:///etc/passwd"), CodeRefused, ""},
		"a redirect without end": {func(s *shelf) {
			s.honest()
			s.front = blobs(func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path, http.StatusFound) })
		}, CodeRefused, "redirects"},
		"a redirect to nothing": {func(s *shelf) {
			s.honest()
			s.front = blobs(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusFound) })
		}, CodeRefused, ""},
		"a token server's metadata":  {challenge("https://169.254.169.254/token"), "", ""},
		"a token server on loopback": {challenge(strings.Replace(strings.Replace(secret.URL, "http", "https", 1), "127.0.0.1", "localhost", 1)), CodeRefused, "loopback"},
		"an endless token": {func(s *shelf) {
			s.front = func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path == "/token" {
					endless(w, r)
					return true
				}
				w.Header().Set("WWW-Authenticate", fmt.Sprintf("Bearer realm=%q", "http://"+r.Host+"/token"))
				w.WriteHeader(http.StatusUnauthorized)
				return true
			}
		}, "", ""},
		"2,000 layers": {func(s *shelf) {
			config, layers := s.honest()
			s.set(config, bytesRepeat(layers[0], 2000))
		}, CodeRefused, "2000 layers"},
		"no layers": {func(s *shelf) { config, _ := s.honest(); s.set(config, nil) }, CodeRefused, "no layers"},
		"an endless manifest": {func(s *shelf) {
			s.front = func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/manifests/") {
					endless(w, r)
					return true
				}
				return false
			}
		}, CodeRefused, "longer"},
		"an endless ping": {func(s *shelf) {
			s.honest()
			s.front = func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path == "/v2/" {
					endless(w, r)
					return true
				}
				return false
			}
		}, "-", ""},
		"an endless header": {func(s *shelf) {
			s.front = func(w http.ResponseWriter, _ *http.Request) bool {
				w.Header().Set("X", strings.Repeat("x", 2*maxHeader))
				return true
			}
		}, CodeUnreachable, ""},
		"a manifest of nothing": {func(s *shelf) { s.kind, s.manifest = "text/html", []byte("<html>") }, CodeRefused, "no image"},
		"schema 1": {func(s *shelf) {
			s.kind, s.manifest = "application/vnd.docker.distribution.manifest.v1+json", []byte("{}")
		}, CodeRefused, "schema 2"},
		"a broken manifest":   {func(s *shelf) { s.kind, s.manifest = manifestKind, []byte("{") }, CodeRefused, "cannot be read"},
		"an index of many":    {func(s *shelf) { s.index(maxPlatforms+1, nil) }, CodeRefused, "entries"},
		"an index of indexes": {func(s *shelf) { s.index(1, s.manifest) }, core.CodeImageNotFound, ""},
		"an index that lies": {func(s *shelf) {
			s.honest()
			other := append([]byte{' '}, s.manifest...)
			s.index(1, other)
			s.manifests(encoded(s.t, "else"))
		}, CodeRefused, "not what the digest"},
		"another architecture": {func(s *shelf) {
			_, layers := s.honest()
			raw := encoded(s.t, map[string]any{"os": "linux", "architecture": "s390x"})
			s.set(descriptor{MediaType: configKind, Digest: s.add(raw), Size: int64(len(raw))}, layers)
		}, core.CodeImageNotFound, "s390x"},
		"a configuration that lies": {func(s *shelf) {
			config, _ := s.honest()
			s.blobs[config.Digest] = append([]byte{' '}, s.blobs[config.Digest]...)
		}, CodeRefused, "not what the digest"},
		"a huge configuration": {func(s *shelf) {
			config, layers := s.honest()
			config.Size = 1 << 40
			s.set(config, layers)
		}, CodeRefused, "the bound is"},
		"many variables": {func(s *shelf) {
			_, layers := s.honest()
			s.set(s.config([]core.Digest{layers[0].Digest}, map[string]any{"Env": strings.Split(strings.Repeat("A=b,", maxEnv+1), ",")}), layers)
		}, CodeRefused, "variables"},
		"many words": {func(s *shelf) {
			_, layers := s.honest()
			s.set(s.config([]core.Digest{layers[0].Digest}, map[string]any{"Cmd": strings.Split(strings.Repeat("a,", maxConfigWords+1), ",")}), layers)
		}, CodeRefused, "words"},
		"much text": {func(s *shelf) {
			_, layers := s.honest()
			s.set(s.config([]core.Digest{layers[0].Digest}, map[string]any{"User": strings.Repeat("a", maxConfigText+1)}), layers)
		}, CodeRefused, "text"},
		"digests of other layers": {func(s *shelf) { _, layers := s.honest(); s.set(s.config(nil, nil), layers) }, CodeRefused, "1 layers and 0 digests"},
		"another hash": {func(s *shelf) {
			config, layers := s.honest()
			layers[0].Digest = "sha512:" + core.Digest(strings.Repeat("0", 128))
			s.set(config, layers)
		}, CodeRefused, "sha256"},
		"a path as a digest": {func(s *shelf) {
			config, layers := s.honest()
			layers[0].Digest = "sha256:../../etc/passwd"
			s.set(config, layers)
		}, CodeRefused, ""},
		"a negative size": {func(s *shelf) {
			config, layers := s.honest()
			layers[0].Size = -1
			s.set(config, layers)
		}, CodeRefused, "-1 bytes"},
		"a huge layer": {func(s *shelf) {
			config, layers := s.honest()
			layers[0].Size = maxCompressed + 1
			s.set(config, layers)
		}, CodeRefused, "the bound is"},
		"huge layers": {func(s *shelf) {
			config, layers := s.honest()
			other := layers[0]
			other.Digest, other.Size, layers[0].Size = core.DigestOf(nil), maxCompressed/2+1, maxCompressed/2
			s.set(config, append(layers, other))
		}, CodeRefused, "more than"},
		"two sizes of a layer": {func(s *shelf) {
			config, layers := s.honest()
			other := layers[0]
			other.Size++
			s.set(config, append(layers, other))
		}, CodeRefused, "two sizes"},
		"a layer elsewhere": {func(s *shelf) {
			config, layers := s.honest()
			layers[0].MediaType = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
			layers[0].URLs = []string{secret.URL}
			s.set(config, layers)
		}, CodeRefused, "not fetched"},
		"a layer that lies": {func(s *shelf) {
			_, layers := s.honest()
			b := bytes.Clone(s.blobs[layers[0].Digest])
			b[100] ^= 1
			s.blobs[layers[0].Digest] = b
		}, CodeRefused, "not what its digest"},
		"a longer layer": {func(s *shelf) {
			_, layers := s.honest()
			s.blobs[layers[0].Digest] = append(s.blobs[layers[0].Digest], 'x')
		}, CodeRefused, "more of the layer"},
		"an endless layer": {func(s *shelf) {
			_, layers := s.honest()
			s.front = func(w http.ResponseWriter, r *http.Request) bool {
				if strings.HasSuffix(r.URL.Path, string(layers[0].Digest)) {
					endless(w, r)
					return true
				}
				return false
			}
		}, CodeRefused, "more of the layer"},
		"a shorter layer": {func(s *shelf) {
			_, layers := s.honest()
			s.blobs[layers[0].Digest] = s.blobs[layers[0].Digest][:1000]
		}, "", ""},
		"sent a part of the layer": {func(s *shelf) {
			_, layers := s.honest()
			whole := s.blobs[layers[0].Digest]
			s.front = func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, string(layers[0].Digest)) {
					return false
				}
				if r.Header.Get("Range") == "" {
					w.Header().Set("Content-Length", fmt.Sprint(len(whole)))
					_, _ = w.Write(whole[:50_000])
					return true
				}
				w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(whole)-1, len(whole)))
				w.WriteHeader(http.StatusPartialContent)
				_, _ = w.Write(whole)
				return true
			}
		}, CodeRefused, "sent a part of the layer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &shelf{t: t}
			c.set(s)
			host := s.start(t)
			layers := openLayers(t)
			o := opts(host, "app:1")
			o.Attempts = 2
			_, err := Pull(t.Context(), layers, o)
			switch {
			case c.want == "-": // it is bounded, and nothing is wrong with the rest
				return
			case err == nil:
				t.Fatal("it was accepted")
			case c.want != "" && core.CodeOf(err) != c.want || !strings.Contains(core.MessageOf(err), c.text):
				t.Errorf("%v (%s), want %s with %q", err, core.CodeOf(err), c.want, c.text)
			}
			kept, err := filepath.Glob(filepath.Join(filepath.Dir(layers.Path(core.DigestOf(nil))), "sha256-*"))
			if err != nil || len(kept) > 0 {
				t.Errorf("kept: %v, %v", kept, err)
			}
		})
	}
}

func bytesRepeat(d descriptor, n int) []descriptor {
	out := make([]descriptor, n)
	for i := range out {
		out[i] = d
	}
	return out
}

// index puts an index on the shelf whose entries are a manifest.
func (s *shelf) index(n int, manifest []byte) {
	s.t.Helper()
	kind := manifestKind
	if manifest == nil {
		kind = "application/vnd.oci.image.index.v1+json"
	}
	entries := make([]map[string]any, n)
	for i := range entries {
		entries[i] = map[string]any{
			"mediaType": kind, "digest": core.DigestOf(manifest), "size": len(manifest), "platform": map[string]string{"os": "linux", "architecture": "amd64"},
		}
	}
	s.kind = "application/vnd.oci.image.index.v1+json"
	s.manifest = encoded(s.t, map[string]any{"schemaVersion": 2, "mediaType": s.kind, "manifests": entries})
}

// manifests answers requests for manifests by digest.
func (s *shelf) manifests(b []byte) {
	s.front = func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/sha256:") {
			_, _ = w.Write(b)
			return true
		}
		return false
	}
}

// TestDigestReference: a reference by digest gets what the digest says, or nothing.
func TestDigestReference(t *testing.T) {
	t.Parallel()
	s := &shelf{t: t}
	s.honest()
	host := s.start(t)
	d := core.DigestOf(s.manifest)
	if _, err := Pull(t.Context(), openLayers(t), opts(host, "app@"+string(d))); err != nil {
		t.Error(err)
	}
	s2 := &shelf{t: t}
	s2.honest()
	s2.manifest = append(s2.manifest, ' ')
	if _, err := Pull(t.Context(), openLayers(t), opts(s2.start(t), "app@"+string(d))); core.CodeOf(err) != CodeRefused || !strings.Contains(err.Error(), "sent a manifest with the digest") {
		t.Errorf("another manifest: %v", err)
	}
}

// TestTrustedHost: a host that the operator names may have a private address.
func TestTrustedHost(t *testing.T) {
	t.Parallel()
	s := &shelf{t: t}
	s.honest()
	store := httptest.NewTLSServer(s)
	defer store.Close()
	other := *s
	other.front = func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			http.Redirect(w, r, store.URL+r.URL.Path, http.StatusTemporaryRedirect)
			return true
		}
		return false
	}
	o := opts(other.start(t), "app:1")
	o.Attempts = 1
	if _, err := Pull(t.Context(), openLayers(t), o); core.CodeOf(err) != CodeRefused || !strings.Contains(err.Error(), "--trusted-host") {
		t.Errorf("without the flag: %v", err)
	}
	o.TrustedHosts = []string{strings.TrimPrefix(store.URL, "https://")}
	// The certificate of the test is not one that this host trusts: the request gets as far as TLS.
	if _, err := Pull(t.Context(), openLayers(t), o); core.CodeOf(err) != CodeUnreachable || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("with the flag: %v", err)
	}
}

// TestGuard: a name that the operator has given may be at any address but those that no registry has; any other host only
// at public ones.
func TestGuard(t *testing.T) {
	t.Parallel()
	g := newGuard(map[string]bool{"registry.example:443": true, "127.0.0.1:5000": true, "169.254.1.1:80": true}, nil, Options{}.withDefaults())
	for host, addresses := range map[string]map[string]bool{
		"registry.example:443": {"93.184.216.34": true, "10.0.0.1": true, "127.0.0.1": true, "169.254.169.254": false, "0.0.0.0": false, "224.0.0.1": false, "fe80::1": false, "::ffff:169.254.169.254": false},
		"registry.example:80":  {"93.184.216.34": true, "10.0.0.1": false},
		"127.0.0.1:5000":       {"127.0.0.1": true},
		"127.0.0.1:5001":       {"127.0.0.1": false},
		"169.254.1.1:80":       {"169.254.1.1": true},
		"cdn.example:443":      {"93.184.216.34": true, "2606:2800:21f::1": true, "127.0.0.1": false, "192.168.0.1": false, "100.64.0.1": false, "::1": false, "::ffff:10.0.0.1": false, "64:ff9b::a00:1": false},
	} {
		for addr, want := range addresses {
			if err := g.check(host, netip.MustParseAddr(addr)); (err == nil) != want || err != nil && core.CodeOf(err) != CodeRefused {
				t.Errorf("%s at %s: %v", host, addr, err)
			}
		}
	}
}

// TestStalled: a registry that accepts requests and says nothing, stops in the middle, or sends a byte now and then, is
// given up. The end of the caller's patience ends a pull at once.
func TestStalled(t *testing.T) {
	t.Parallel()
	wait := func(r *http.Request) { <-r.Context().Done() }
	for name, front := range map[string]func(http.ResponseWriter, *http.Request){
		"says nothing": func(_ http.ResponseWriter, r *http.Request) { wait(r) },
		"stops": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = io.WriteString(w, "some")
			_ = http.NewResponseController(w).Flush()
			wait(r)
		},
		"drips": func(w http.ResponseWriter, r *http.Request) {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-r.Context().Done():
					return
				case <-tick.C:
					_, _ = io.WriteString(w, " ")
					_ = http.NewResponseController(w).Flush()
				}
			}
		},
	} {
		for _, what := range []string{"/v2/", "/manifests/", "/blobs/"} {
			t.Run(name+" "+what, func(t *testing.T) {
				t.Parallel()
				s := &shelf{t: t}
				s.honest()
				s.front = func(w http.ResponseWriter, r *http.Request) bool {
					if r.URL.Path == what || what != "/v2/" && strings.Contains(r.URL.Path, what) {
						front(w, r)
						return true
					}
					return false
				}
				o := opts(s.start(t), "app:1")
				o.Stall, o.Attempts = 300*time.Millisecond, 1
				if _, err := Pull(t.Context(), openLayers(t), o); core.CodeOf(err) != CodeUnreachable && (what != "/v2/" || err != nil) {
					t.Errorf("%v (%s)", err, core.CodeOf(err))
				}
				o.Stall, o.Timeout = time.Hour, 300*time.Millisecond
				if _, err := Pull(t.Context(), openLayers(t), o); core.CodeOf(err) != core.CodeTimedOut && (what != "/v2/" || err != nil) {
					t.Errorf("the end of the time: %v (%s)", err, core.CodeOf(err))
				}
			})
		}
	}
}

// TestNoRoom: layers that cannot fit are refused before the first byte.
func TestNoRoom(t *testing.T) {
	t.Parallel()
	layers := openLayers(t)
	if err := layers.Room(1 << 62); core.CodeOf(err) != core.CodeDiskFull {
		t.Errorf("more than any disk has: %v", err)
	}
	if err := layers.Room(1); err != nil {
		t.Error(err)
	}
}

// TestPullsAtOnce: pulls of one layer wait for each other, and it is fetched once.
func TestPullsAtOnce(t *testing.T) {
	t.Parallel()
	s := &shelf{t: t}
	_, want := s.honest()
	var asked atomic.Int64
	s.front = func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, string(want[0].Digest)) {
			asked.Add(1)
		}
		return false
	}
	host := s.start(t)
	store, err := images.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	for range 4 {
		go func() {
			layers, err := store.Layers(t.Context())
			if err == nil {
				_, err = Pull(t.Context(), layers, opts(host, "app:1"))
				err = errors.Join(err, layers.Close())
			}
			ended <- err
		}()
	}
	for range 4 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("the layer was asked for %d times", n)
	}
	entries, err := os.ReadDir(filepath.Join(store.Dir(), "layers"))
	if err != nil || len(entries) != 2 { // the layer and the lock
		t.Errorf("in the directory of layers: %v, %v", entries, err)
	}
}
