package runner

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/bootclock"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// journal has what a successor of the runner must know of a shell, to adopt it or to take it down. It is written before the things that
// it names are made or changed, completely or not at all. It is not synced: the death of a runner loses nothing of the kernel's cache. A
// power cut may lose the journal, but it also ends the VMM; then the boot id shows that the journal is no longer valid (ADR 20).
type journal struct {
	Version   int            `json:"version"`
	Boot      string         `json:"boot"` // boot id of the host's kernel: no VMM lives longer than this
	ID        core.SandboxID `json:"id"`   // of the shell
	ClusterID string         `json:"cluster_id"`
	Slot      int            `json:"slot"`
	Shape     journalShape   `json:"shape"`
	// Class is the class of the machine. It stays the same even if a runner with another VMM adopts the machine. It is zero in old journals.
	Class     runnerapi.RunnerClass `json:"class,omitzero"`
	Namespace string                `json:"namespace,omitempty"`
	Pager     string                `json:"pager,omitempty"` // the instance of the pager that serves its memory or disk
	Handle    *vmm.Handle           `json:"handle,omitempty"`
	Sandbox   *sandboxJournal       `json:"sandbox,omitempty"` // set as soon as the shell will become a sandbox
}

// journalVersion is the version that this program writes and reads. A shell with a journal of another version is taken down, because this
// program cannot know what the journal means.
const journalVersion = 1

const journalFile = "journal.json"

type journalShape struct {
	Base      core.BaseID    `json:"base"`
	Image     core.Digest    `json:"image"`
	Root      roots.Key      `json:"root,omitempty"`
	Resources core.Resources `json:"resources"`
	DiskBytes int64          `json:"disk_bytes"`
}

// sandboxJournal is the part for a sandbox. The state is starting until every step is proven and the workload is released.
type sandboxJournal struct {
	Info   runnerapi.Sandbox     `json:"info"`
	Egress core.EgressPolicy     `json:"egress"` // the policy with which its namespace is opened
	Rules  runnerapi.EgressRules `json:"rules,omitzero"`
	Reseal *core.ResealReport    `json:"reseal,omitempty"`
	// Attestation is this runner's signed report of its reseal.
	Attestation []byte           `json:"attestation,omitempty"`
	Ports       []runnerapi.Port `json:"ports,omitempty"`

	Capture  core.CheckpointID   `json:"capture,omitempty"`   // under way
	Stop     bool                `json:"stop,omitempty"`      // the sandbox ends with this capture
	CutShort []core.CheckpointID `json:"cut_short,omitempty"` // captures that ended because their runner ended
}

func (s *shell) writeJournal() error {
	s.Version, s.Boot = journalVersion, bootclock.BootID()
	s.Shape = journalShape{Base: s.shape.base, Image: s.shape.image, Root: s.shape.root, Resources: s.shape.resources, DiskBytes: s.shape.diskBytes}
	if err := atomicfile.ReplaceJSON(filepath.Join(s.runDir, journalFile), s.journal); err != nil {
		return fmt.Errorf("write the journal of shell %s: %w", s.ID, err)
	}
	return nil
}

// record changes the journal of a sandbox.
func (s *sandbox) record(change func(j *sandboxJournal)) error {
	s.journalMu.Lock()
	defer s.journalMu.Unlock()
	if s.Sandbox == nil {
		s.Sandbox = &sandboxJournal{}
	}
	change(s.Sandbox)
	return s.writeJournal()
}

// leftover is a shell, or a part of one, that an earlier runner has left.
type leftover struct {
	name    string   // of its directories
	journal *journal // nil if it cannot be read
}

// adoptable reports whether it may be a sandbox that this runner can adopt. A sandbox that was not ready was never released, and a
// shell that is not a sandbox is no longer needed.
func (l leftover) adoptable() bool {
	j := l.journal
	return j != nil && j.Handle != nil && j.Sandbox != nil && j.Sandbox.Info.State == runnerapi.SandboxReady
}

// usesPager reports whether it has memory from a pager.
func (l leftover) usesPager() bool { return l.journal != nil && l.journal.Pager != "" }

// survey reads what earlier runners have left in both directories. If it finds a journal of another cluster, the directory is not
// this runner's, and survey changes nothing.
func (r *Runner) survey() ([]leftover, error) {
	var list []leftover
	seen := map[string]bool{}
	for _, dir := range []string{r.cfg.RunDir, r.shellsDir()} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if _, err := core.ParseID[core.SandboxID](e.Name()); err != nil || !e.IsDir() || seen[e.Name()] {
				continue
			}
			seen[e.Name()] = true
			j, err := r.readJournal(e.Name())
			if err != nil {
				return nil, err
			}
			list = append(list, leftover{e.Name(), j})
		}
	}
	return list, nil
}

// readJournal returns nil for a journal that is absent, damaged, of another version, or older than the start of the host.
func (r *Runner) readJournal(name string) (*journal, error) {
	b, err := os.ReadFile(filepath.Join(r.cfg.RunDir, name, journalFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil //nolint:nilnil // see above
	}
	if err != nil {
		return nil, err
	}
	j := new(journal)
	if json.Unmarshal(b, j) != nil {
		j = &journal{}
	}
	switch {
	case j.ClusterID != "" && j.ClusterID != r.cfg.ClusterID:
		return nil, core.Errorf(core.FailedPrecondition, core.CodeStateConflict,
			"%s holds sandboxes of another cluster (%s); give this runner a run directory of its own", r.cfg.RunDir, core.Clip(j.ClusterID))
	case j.Boot != "" && j.Boot != bootclock.BootID():
		return nil, nil //nolint:nilnil // see above
	case j.Version != journalVersion || string(j.ID) != name:
		r.cfg.Log.Warn("journal of a sandbox is not understood", "shell_id", name, "version", j.Version)
		return nil, nil //nolint:nilnil // see above
	}
	return j, nil
}

// Inhabited reports whether an earlier runner has left machines of sandboxes in a run directory. A journal that cannot be read may belong to one.
func Inhabited(runDir string) bool {
	paths, _ := filepath.Glob(filepath.Join(runDir, "*", journalFile)) // the pattern is good
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		var j journal
		if err != nil || json.Unmarshal(b, &j) != nil || j.Boot == bootclock.BootID() && j.Handle != nil && j.Sandbox != nil {
			return true
		}
	}
	return false
}
