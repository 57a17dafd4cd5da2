// Package version says which build of Coppice a program is, from what the Go tool recorded in it.
package version

import (
	"runtime"
	"runtime/debug"
	"sync"
)

// devel is the version of a build for which the Go tool recorded none: a build without the data of the repository, or a test.
const devel = "devel"

// Build describes a build.
type Build struct {
	// Version is a tag, as v1.2.3, or a pseudo-version of the commit, or "devel". It ends with +dirty if the build had changes that
	// are in no commit.
	Version string `json:"version"`
	// Commit and CommitDate are empty if the Go tool did not record them. The date is in the form of RFC 3339, in UTC.
	Commit     string `json:"commit,omitempty"`
	CommitDate string `json:"commit_date,omitempty"`
	// Modified says that the build had changes that are in no commit.
	Modified  bool   `json:"modified"`
	GoVersion string `json:"go_version"`
	OS        string `json:"os"`
	Arch      string `json:"arch"`
}

// Of returns the build of this program.
var Of = sync.OnceValue(func() Build {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	return read(info)
})

// String returns the version of this program alone.
func String() string { return Of().Version }

func read(info *debug.BuildInfo) Build {
	b := Build{Version: devel, GoVersion: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		b.Version = v
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.time":
			b.CommitDate = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}
