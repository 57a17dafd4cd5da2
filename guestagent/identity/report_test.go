package identity

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

func TestEditHosts(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, hosts, old, want string }{
		{"empty", "", "coppice", "127.0.0.1\tlocalhost\n127.0.1.1\tfork\n"},
		{"Debian's", "127.0.0.1\tlocalhost\n127.0.1.1\told.example old\n", "old", "127.0.0.1\tlocalhost\n127.0.1.1\tfork\n"},
		{
			"a user's lines", "# mine\n127.0.0.1 localhost old\n\n10.0.0.5 db older # old\n::1 localhost", "old",
			"# mine\n127.0.0.1\tlocalhost\tfork\n\n10.0.0.5\tdb\tolder # old\n::1\tlocalhost\n127.0.1.1\tfork\n",
		},
		{"localhost stays", "127.0.0.1 localhost\n", "localhost", "127.0.0.1\tlocalhost\n127.0.1.1\tfork\n"},
	} {
		if diff := cmp.Diff(tc.want, EditHosts(tc.hosts, tc.old, "fork")); diff != "" {
			t.Errorf("%s:\n%s", tc.name, diff)
		}
		// A fork of the fork renames it again, and the file does not grow.
		again := EditHosts(EditHosts(tc.hosts, tc.old, "fork"), "fork", "second")
		if strings.Contains(again, "fork") || strings.Count(again, "127.0.1.1") != 1 {
			t.Errorf("%s, renamed again: %q", tc.name, again)
		}
	}
}

// TestDescribe: a fork's reseal changes nothing of what is compared, and a user's change does.
func TestDescribe(t *testing.T) {
	t.Parallel()
	const image = "127.0.0.1\tlocalhost\n127.0.1.1\tcoppice\n"
	const mine = image + "10.0.0.5 db db.example # mine\n"
	first := Describe(hostsFile, image, "", false, "coppice")
	for name, f := range map[string]guestapi.IdentityFile{
		"a fork":             Describe(hostsFile, EditHosts(image, "coppice", "fork-1"), "", false, "fork-1"),
		"a fork of the fork": Describe(hostsFile, EditHosts(EditHosts(image, "coppice", "fork-1"), "fork-1", "other"), "", false, "other"),
	} {
		if f.SHA256 != first.SHA256 || f.Own {
			t.Errorf("%s: %+v, the image: %+v", name, f, first)
		}
	}
	changed := Describe(hostsFile, mine, "", false, "coppice")
	fork := Describe(hostsFile, EditHosts(mine, "coppice", "fork-1"), "", false, "fork-1")
	if changed.SHA256 == first.SHA256 || fork.SHA256 != changed.SHA256 {
		t.Errorf("the image %+v, with a line of a user %+v, a fork of that %+v", first, changed, fork)
	}
	own := guestapi.IdentityFile{Path: hostnameFile, Size: 7, Own: true}
	for name, f := range map[string]guestapi.IdentityFile{
		"as written":     Describe(hostnameFile, "fork-1\n", "fork-1\n", true, "renamed"),
		"as in an image": Describe(hostnameFile, "fork-1\n", "", false, "fork-1"),
	} {
		if diff := cmp.Diff(own, f); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	for name, f := range map[string]guestapi.IdentityFile{
		"renamed":                   Describe(hostnameFile, "mine\n", "fork-1\n", true, "mine"),
		"emptied":                   Describe(hostnameFile, "", "fork-1\n", true, "fork-1"),
		"before any reseal":         Describe("/etc/resolv.conf", "nameserver 192.0.2.1\n", "", false, "coppice"),
		"another resolver than own": Describe("/etc/resolv.conf", "nameserver 192.0.2.1\n", "nameserver 192.0.2.2\n", true, "coppice"),
	} {
		if f.Own || len(f.SHA256) != 64 {
			t.Errorf("%s: %+v", name, f)
		}
	}
	if f := Describe("/etc/resolv.conf", "", "", false, "coppice"); !f.Own {
		t.Errorf("the image's: %+v", f)
	}
}

// BenchmarkDescribe describes an /etc/hosts as images have it, and the largest that is read: this happens in the pause of a capture.
func BenchmarkDescribe(b *testing.B) {
	const line = "0.0.0.0\tads.example\n"
	for name, hosts := range map[string]string{"small": "127.0.0.1\tlocalhost\n127.0.1.1\told\n", "largest": strings.Repeat(line, maxReported/len(line))} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				Describe(hostsFile, hosts, "", false, "old")
			}
		})
	}
}
