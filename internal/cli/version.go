package cli

import (
	"cmp"
	"io"

	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/version"
)

// PrintVersion prints which build this program is. "coppice version" and "coppice --version" are the same.
func (a *App) PrintVersion() error {
	b := version.Of()
	commit := cmp.Or(b.Commit, "unknown, it was built without the data of the repository")
	if b.Modified {
		commit += " with changes"
	}
	return a.Print(b, func(w io.Writer) error {
		return render.Facts(w, "version", b.Version, "commit", commit, "commit date", b.CommitDate, "Go", b.GoVersion, "platform", b.OS+"/"+b.Arch)
	})
}
