package checkpoint

import (
	"strings"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestDiffOfFilesInMemory: the command says that a file is in memory, and that a guest did not report such files.
func TestDiffOfFilesInMemory(t *testing.T) {
	t.Parallel()
	d := coppice.CheckpointDiff{FilesComplete: true, Items: []coppice.FileChange{{Path: "/etc/hosts", Change: "changed", Type: "file", InMemory: true}}}
	for _, unknown := range []bool{false, true} {
		d.IdentityUnknown = unknown
		var b strings.Builder
		if err := printDiff(&b, d); err != nil {
			t.Fatal(err)
		}
		if text := b.String(); !strings.Contains(text, "/etc/hosts (in memory)") || strings.Contains(text, "a guest did not report") != unknown {
			t.Errorf("unknown %v: %s", unknown, text)
		}
	}
}
