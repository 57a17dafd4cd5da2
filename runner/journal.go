package runner

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// journal is what a successor of the runner must know of a shell, to take it over or to take it down. It is written before what it
// names is made or changed, whole or not at all. It is not synced: a runner's death takes nothing from the kernel's cache, and what a
// power cut takes it takes from the VMM too; then its boot id tells that it means nothing any more (ADR 20).
type journal struct {
	Version   int            `json:"version"`
	Boot      string         `json:"boot"` // of the host's kernel: a VMM lives no longer
	ID        core.SandboxID `json:"id"`   // of the shell
	ClusterID string         `json:"cluster_id"`
	Slot      int            `json:"slot"`
	Shape     journalShape   `json:"shape"`
	// Class is of the machine, which keeps it whatever VMM the runner that takes it over has; zero in journals of before it was kept.
	Class     runnerapi.RunnerClass `json:"class,omitzero"`
	Namespace string                `json:"namespace,omitempty"`
	Pager     string                `json:"pager,omitempty"` // the instance that it has memory or disk from
	Handle    *vmm.Handle           `json:"handle,omitempty"`
	Sandbox   *sandboxJournal       `json:"sandbox,omitempty"` // from the moment on that the shell has a purpose
}

// journalVersion is the form that this program writes and reads. One of another form is taken down: what it means is not known.
const journalVersion = 1

const journalFile = "journal.json"

type journalShape struct {
	Base      core.BaseID    `json:"base"`
	Image     core.Digest    `json:"image"`
	Root      rootKey        `json:"root,omitempty"`
	Resources core.Resources `json:"resources"`
	DiskBytes int64          `json:"disk_bytes"`
}

// sandboxJournal is of a sandbox. Its state is starting until everything was proven and the workload released.
type sandboxJournal struct {
	Info   runnerapi.Sandbox     `json:"info"`
	Egress core.EgressPolicy     `json:"egress"` // what its namespace is opened with
	Rules  runnerapi.EgressRules `json:"rules,omitzero"`
	Reseal *core.ResealReport    `json:"reseal,omitempty"`
	// Attestation is this runner's signed report of its reseal.
	Attestation []byte           `json:"attestation,omitempty"`
	Ports       []runnerapi.Port `json:"ports,omitempty"`

	Capture  core.CheckpointID   `json:"capture,omitempty"`   // under way
	Stop     bool                `json:"stop,omitempty"`      // with its end the sandbox ends
	CutShort []core.CheckpointID `json:"cut_short,omitempty"` // captures that the end of a runner has ended
}

func (s *shell) writeJournal() error {
	s.Version, s.Boot = journalVersion, bootID()
	s.Shape = journalShape{Base: s.shape.base, Image: s.shape.image, Root: s.shape.root, Resources: s.shape.resources, DiskBytes: s.shape.diskBytes}
	if err := replaceJSON(filepath.Join(s.runDir, journalFile), s.journal); err != nil {
		return fmt.Errorf("write the journal of shell %s: %w", s.ID, err)
	}
	return nil
}

// replaceJSON writes a file whole or not at all, as far as the death of this process goes.
func replaceJSON(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
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

// leftover is what an earlier runner has left of a shell.
type leftover struct {
	name    string   // of its directories
	journal *journal // nil where it cannot be read
}

// adoptable reports whether it may be a sandbox to go on with. One that was not ready was never released, and what is not a
// sandbox has no use any more.
func (l leftover) adoptable() bool {
	j := l.journal
	return j != nil && j.Handle != nil && j.Sandbox != nil && j.Sandbox.Info.State == runnerapi.SandboxReady
}

// usesPager reports whether it has memory from a pager.
func (l leftover) usesPager() bool { return l.journal != nil && l.journal.Pager != "" }

// survey reads what earlier runners have left in both directories. A journal of another cluster means that the directory is not
// this runner's: then nothing at all is touched.
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

// readJournal returns nil for one that is absent, damaged, of another version or from before the host was started.
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
	case j.Boot != "" && j.Boot != bootID():
		return nil, nil //nolint:nilnil // see above
	case j.Version != journalVersion || string(j.ID) != name:
		r.cfg.Log.Warn("journal of a sandbox is not understood", "shell_id", name, "version", j.Version)
		return nil, nil //nolint:nilnil // see above
	}
	return j, nil
}

// Inhabited reports whether an earlier runner has left machines of sandboxes in a run directory. A journal that cannot be read may be of one.
func Inhabited(runDir string) bool {
	paths, _ := filepath.Glob(filepath.Join(runDir, "*", journalFile)) // the pattern is good
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		var j journal
		if err != nil || json.Unmarshal(b, &j) != nil || j.Boot == bootID() && j.Handle != nil && j.Sandbox != nil {
			return true
		}
	}
	return false
}
