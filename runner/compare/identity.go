package compare

import (
	"bytes"
	"slices"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/diskdiff"
)

// addIdentity adds to a page of the disks' differences the files with a machine's identity that a workload has changed. They are in the
// memory of the machines, and mounted over those of the disks, so the disks do not show them. The guests have reported what is in them
// (docs/adr/0064-changes-to-identity-files.md).
func addIdentity(page *runnerapi.DiffPage, a, b []guestapi.IdentityFile, req runnerapi.Diff) {
	changes, complete := identityChanges(a, b)
	page.IdentityComplete = complete
	for _, change := range changes {
		if len(req.After) > 0 && comparePaths(change.Path, req.After) <= 0 || len(page.Next) > 0 && comparePaths(change.Path, page.Next) > 0 {
			continue // it is on another page
		}
		at, found := slices.BinarySearchFunc(page.Files, change.Path, func(f runnerapi.FileChange, path []byte) int { return comparePaths(f.Path, path) })
		if found { // the disk's file differs, too, which no program in the machine saw
			page.Files[at] = change
		} else {
			page.Files = slices.Insert(page.Files, at, change)
		}
	}
	if len(page.Files) > req.Limit { // the rest is on the next page
		page.Files = page.Files[:req.Limit]
		page.Next = page.Files[req.Limit-1].Path
	}
}

// identityChanges compares what the guests have reported. A path that only one of them has reported is on the other's disk.
func identityChanges(a, b []guestapi.IdentityFile) (changes []runnerapi.FileChange, complete bool) {
	complete = a != nil && b != nil
	of := func(list []guestapi.IdentityFile, path string) (guestapi.IdentityFile, bool) {
		i := slices.IndexFunc(list, func(f guestapi.IdentityFile) bool { return f.Path == path })
		if i < 0 {
			return guestapi.IdentityFile{}, false
		}
		return list[i], true
	}
	for _, path := range guestapi.IdentityPaths() {
		x, inA := of(a, path)
		y, inB := of(b, path)
		unknown := func(f guestapi.IdentityFile) bool { return !f.Own && f.SHA256 == "" }
		switch {
		case !inA || !inB:
		case unknown(x) && unknown(y) && x.Size == y.Size:
			complete = false
		case x.Own != y.Own || x.SHA256 != y.SHA256 || unknown(x):
			changes = append(changes, runnerapi.FileChange{
				Path: []byte(path), Change: string(diskdiff.Changed), Type: "file", What: []string{diskdiff.Content},
				Size: max(y.Size, 0), SizeBefore: max(x.Size, 0), InMemory: true,
			})
		}
	}
	return changes, complete
}

// comparePaths compares absolute paths name by name, as the pages are ordered.
func comparePaths(a, b []byte) int {
	return slices.CompareFunc(bytes.Split(a, []byte("/")), bytes.Split(b, []byte("/")), bytes.Compare)
}
