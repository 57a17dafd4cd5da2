package daemon_test

import (
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/daemon"
)

// TestPreviewFlags: what cannot be served is refused, and the message names the flag.
func TestPreviewFlags(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		cfg   daemon.PreviewConfig
		plain bool
		says  string // empty: it can be served
	}{
		{cfg: daemon.PreviewConfig{}},
		{cfg: daemon.PreviewConfig{Domain: "preview.example"}, says: "--preview-listen"},
		{cfg: daemon.PreviewConfig{Listen: "127.0.0.1:1", Domain: "localhost"}},
		{cfg: daemon.PreviewConfig{Listen: "127.0.0.1:1", Domain: "Preview.example"}, says: "--preview-domain"},
		{cfg: daemon.PreviewConfig{Listen: ":1", Domain: "preview.example"}, says: "without TLS"},
		{cfg: daemon.PreviewConfig{Listen: ":1", Domain: "preview.example", Proxies: []string{"192.0.2.0/24", "2001:db8::/32"}}, plain: true},
		{cfg: daemon.PreviewConfig{Listen: ":1", Domain: "preview.example", Proxies: []string{"192.0.2.1"}}, plain: true, says: "--preview-proxy"},
		{cfg: daemon.PreviewConfig{Listen: ":1", Domain: "preview.example", TLSCert: "a"}, says: "go together"},
		{cfg: daemon.PreviewConfig{Listen: ":1", Domain: "preview.example", ACMEHosts: []string{"a.preview.example"}, ACMECache: "a"}, says: "--preview-acme-host"},
	} {
		err := c.cfg.Validate(c.plain)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, want %q", c.cfg, err, c.says)
		}
	}
}
