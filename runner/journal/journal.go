// Package journal has what a runner notes about each of its shells. Its successor reads the notes to adopt the shell or to take it down.
//
// A journal is written before the things that it names are made or changed, completely or not at all. It is not synced: the death of a runner
// loses nothing of the kernel's cache. A power cut may lose the journal, but it also ends the VMM; then the boot id shows that the journal is no
// longer valid (ADR 20).
package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/bootclock"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// Journal is a whole journal, as its file has it.
type Journal struct {
	Shell
	Sandbox *Sandbox `json:"sandbox,omitempty"` // set as soon as the shell will become a sandbox
}

// Shell is the part for a shell.
type Shell struct {
	Version   int            `json:"version"`
	Boot      string         `json:"boot"` // boot id of the host's kernel: no VMM lives longer than this
	ID        core.SandboxID `json:"id"`   // of the shell
	ClusterID string         `json:"cluster_id"`
	Slot      int            `json:"slot"`
	Shape     Shape          `json:"shape"`
	// Class is the class of the machine. It stays the same even if a runner with another VMM adopts the machine. It is zero in old journals.
	Class     runnerapi.RunnerClass `json:"class,omitzero"`
	Namespace string                `json:"namespace,omitempty"`
	Pager     string                `json:"pager,omitempty"` // the instance of the pager that serves its memory or disk
	Handle    *vmm.Handle           `json:"handle,omitempty"`
}

// Shape is the part that all machines of a base have in common.
type Shape struct {
	Base      core.BaseID    `json:"base"`
	Image     core.Digest    `json:"image"`
	Root      roots.Key      `json:"root,omitempty"`
	Resources core.Resources `json:"resources"`
	DiskBytes int64          `json:"disk_bytes"`
}

// Sandbox is the part for a sandbox. The state is starting until every step is proven and the workload is released.
type Sandbox struct {
	Info   runnerapi.Sandbox     `json:"info"`
	Egress core.EgressPolicy     `json:"egress"` // the policy with which its namespace is opened
	Rules  runnerapi.EgressRules `json:"rules,omitzero"`
	Reseal *core.ResealReport    `json:"reseal,omitempty"`
	// Attestation is the runner's signed report of its reseal.
	Attestation []byte           `json:"attestation,omitempty"`
	Ports       []runnerapi.Port `json:"ports,omitempty"`

	Capture  core.CheckpointID   `json:"capture,omitempty"`   // under way
	Stop     bool                `json:"stop,omitempty"`      // the sandbox ends with this capture
	CutShort []core.CheckpointID `json:"cut_short,omitempty"` // captures that failed, or ended because their runner ended; the last of them
}

// version is the version that this program writes and reads. A shell with a journal of another version is taken down, because this program
// cannot know what the journal means.
const version = 1

// File is the name of a journal, in a directory for each shell.
const File = "journal.json"

// Write writes the journal of a shell into its directory. sandbox is nil if the shell is not a sandbox.
func Write(dir string, shell Shell, sandbox *Sandbox) error {
	shell.Version, shell.Boot = version, bootclock.BootID()
	if err := atomicfile.ReplaceJSON(filepath.Join(dir, File), Journal{shell, sandbox}); err != nil {
		return fmt.Errorf("write the journal of shell %s: %w", shell.ID, err)
	}
	return nil
}

// UnusableError says that a journal is damaged, or that another version of this program has written it.
type UnusableError struct {
	Version int // of the journal; 0: it cannot be read
}

// Error implements error.
func (e UnusableError) Error() string {
	return fmt.Sprintf("the journal is damaged or has another version (%d)", e.Version)
}

// Read reads the journal in a directory, which has the name of its shell. It returns nil if there is none, or if it is older than the start of
// the host. For a journal that is damaged or has another version, it returns an UnusableError. If the journal is of another cluster, the error says so.
func Read(dir, clusterID string) (*Journal, error) {
	b, err := os.ReadFile(filepath.Join(dir, File))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil //nolint:nilnil // see above
	}
	if err != nil {
		return nil, err
	}
	j := new(Journal)
	if json.Unmarshal(b, j) != nil {
		j = &Journal{}
	}
	switch {
	case j.ClusterID != "" && j.ClusterID != clusterID:
		return nil, core.Errorf(core.FailedPrecondition, core.CodeStateConflict,
			"%s holds sandboxes of another cluster (%s); give this runner a run directory of its own", filepath.Dir(dir), core.Clip(j.ClusterID))
	case j.Boot != "" && j.Boot != bootclock.BootID():
		return nil, nil //nolint:nilnil // see above
	case j.Version != version || string(j.ID) != filepath.Base(dir):
		return nil, UnusableError{j.Version}
	}
	return j, nil
}

// Inhabited reports whether an earlier runner has left machines of sandboxes in a run directory. A journal that cannot be read may belong to one.
func Inhabited(runDir string) bool {
	paths, _ := filepath.Glob(filepath.Join(runDir, "*", File)) // the pattern is good
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		var j Journal
		if err != nil || json.Unmarshal(b, &j) != nil || j.Boot == bootclock.BootID() && j.Handle != nil && j.Sandbox != nil {
			return true
		}
	}
	return false
}

// Notes are the part of a journal for one sandbox. A sandbox that is being made has none before Announce. They are safe for concurrent use.
type Notes struct {
	write func(*Sandbox) error // writes the whole journal

	mu  sync.Mutex // guards now; it is also held during a write, so that writes take turns
	now *Sandbox   // nil: the sandbox was not announced
}

// NewNotes returns the notes of a sandbox. written is what its journal already has; nil: nothing. write writes the journal with the part for the
// sandbox.
func NewNotes(written *Sandbox, write func(*Sandbox) error) *Notes {
	return &Notes{now: written, write: write}
}

// ErrNotAnnounced is returned for a sandbox that is being made and has no notes yet.
var ErrNotAnnounced = errors.New("the sandbox is being made, and its journal does not know it yet")

// Announce begins the notes.
func (n *Notes) Announce(first Sandbox) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.now = &first
	return n.write(n.now)
}

// Change changes the notes. After an error the file has the old ones, and the next change writes both.
func (n *Notes) Change(change func(*Sandbox)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.now == nil {
		return ErrNotAnnounced
	}
	change(n.now)
	return n.write(n.now)
}

// Read returns the notes. ok is false if there are none.
func (n *Notes) Read() (_ Sandbox, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.now == nil {
		return Sandbox{}, false
	}
	return *n.now, true
}
