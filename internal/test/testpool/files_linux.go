package testpool

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/coppice-dev/coppice/runner/memory"
)

// Files is where the runner keeps its files.
func (h *Host) Files() string {
	volume := filepath.Join(h.Data, "volume") // where one was made
	if _, err := os.Stat(volume); err == nil {
		return filepath.Join(volume, "runner")
	}
	return filepath.Join(h.Data, "runner")
}

// Checkpoint is the directory of a checkpoint on the host.
func (h *Host) Checkpoint(id string) string { return filepath.Join(h.Files(), "checkpoints", id) }

// Memory reads the whole memory of a checkpoint as the host has it. It allocates as much.
func (h *Host) Memory(id string) (out []byte, err error) {
	b, err := os.ReadFile(filepath.Join(h.Checkpoint(id), "checkpoint.json"))
	if err != nil {
		return nil, err
	}
	var rec struct {
		Base       string `json:"base"`
		DeltaBytes int64  `json:"delta_bytes"`
	}
	if err := json.Unmarshal(b, &rec); err != nil {
		return nil, err
	}
	base, err := os.Open(filepath.Join(h.Files(), "bases", rec.Base+".ram"))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, base.Close()) }()
	img := memory.Image{Base: base}
	if rec.DeltaBytes > 0 {
		if img.Delta, err = memory.OpenDelta(filepath.Join(h.Checkpoint(id), "memory.delta")); err != nil {
			return nil, err
		}
		defer img.Delta.Close()
	}
	info, err := base.Stat()
	if err != nil {
		return nil, err
	}
	out = make([]byte, info.Size())
	return out, memory.NewReader(img).ReadAt(out, 0)
}

// RemoveDir removes a directory and what is in it, but nothing below a mount that is still there.
func RemoveDir(dir string) error {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[1]+"/", dir+"/") {
			return fmt.Errorf("%s is still mounted; nothing below it was removed", f[1])
		}
	}
	return os.RemoveAll(dir)
}
