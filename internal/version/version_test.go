package version

import (
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRead(t *testing.T) {
	t.Parallel()
	here := Build{GoVersion: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	with := func(change func(*Build)) Build {
		b := here
		change(&b)
		return b
	}
	settings := func(modified string) []debug.BuildSetting {
		return []debug.BuildSetting{
			{Key: "GOOS", Value: "plan9"},
			{Key: "vcs", Value: "git"},
			{Key: "vcs.revision", Value: "0123456789abcdef"},
			{Key: "vcs.time", Value: "2026-11-29T16:00:00Z"},
			{Key: "vcs.modified", Value: modified},
		}
	}
	for name, c := range map[string]struct {
		info debug.BuildInfo
		want Build
	}{
		"nothing is recorded": {debug.BuildInfo{}, with(func(b *Build) { b.Version = "devel" })},
		"without the repository's data": {
			debug.BuildInfo{Main: debug.Module{Version: "(devel)"}},
			with(func(b *Build) { b.Version = "devel" }),
		},
		"a tag": {
			debug.BuildInfo{Main: debug.Module{Version: "v1.2.3"}, Settings: settings("false")},
			with(func(b *Build) {
				b.Version, b.Commit, b.CommitDate = "v1.2.3", "0123456789abcdef", "2026-11-29T16:00:00Z"
			}),
		},
		"with changes": {
			debug.BuildInfo{Main: debug.Module{Version: "v0.0.0-20261129160000-0123456789ab+dirty"}, Settings: settings("true")},
			with(func(b *Build) {
				b.Version, b.Commit, b.CommitDate = "v0.0.0-20261129160000-0123456789ab+dirty", "0123456789abcdef", "2026-11-29T16:00:00Z"
				b.Modified = true
			}),
		},
	} {
		if diff := cmp.Diff(c.want, read(&c.info)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
