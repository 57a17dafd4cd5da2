package cloudhypervisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// strategy is the way to take device state from a release of cloud-hypervisor, and to load it, without memory.
type strategy interface {
	// capture makes a paused VMM write its state into its own directory, and returns the state. It leaves nothing in
	// the directory.
	capture(ctx context.Context, a api, own *os.Root) ([]byte, error)
	// restorable converts a captured state into the state.json of a restore. Beside it, there is a memory-ranges as
	// large as RAM, with the delta in its places and holes elsewhere. RAM stays as in the zone's file where there is a
	// hole.
	restorable(state []byte) ([]byte, error)
}

// strategyFor chooses the strategy for a version.
func strategyFor(version string) (strategy, error) {
	switch n := major(version); {
	case n < 53:
		return nil, core.Errorf(core.FailedPrecondition, core.CodeVMMFailed, "cloud-hypervisor %s does not drain a disk's requests in a pause; Coppice needs %s: run `make setup-kvm`", version, Supported)
	case n > 53:
		return nil, core.Errorf(core.FailedPrecondition, core.CodeVMMFailed, "cloud-hypervisor %s is too new: Coppice does not know how to take device state from it and needs %s: run `make setup-kvm`", version, Supported)
	}
	return placeholder{}, nil
}

// strategy chooses by the version that the VMM itself reports: an earlier runner may have started a release that is not
// the installed one.
func (a api) strategy(ctx context.Context) (strategy, error) {
	b, err := a.get(ctx, "vmm.ping")
	if err != nil {
		return nil, err
	}
	var ping struct {
		Version string `json:"version"`
	}
	if err := json.Unmarshal(b, &ping); err != nil {
		return nil, core.Wrapf(err, core.Internal, core.CodeVMMFailed, "cloud-hypervisor's answer to vmm.ping cannot be read")
	}
	return strategyFor(ping.Version)
}

// The files of a snapshot.
const (
	configFile = "config.json"
	stateFile  = "state.json"
	memoryFile = "memory-ranges"
)

// placeholder is the strategy for releases that cannot take a snapshot without memory. They write config.json, then
// state.json, and only then create the file for memory, which must not exist. If it exists, the snapshot fails there:
// both files are complete, no page was read, and the machine is paused as before.
type placeholder struct{}

// maxState bounds a state. A machine with two vCPUs has about 100 KiB of state, and each vCPU about 30 KiB.
const maxState = 16 << 20

func (placeholder) capture(ctx context.Context, a api, own *os.Root) (state []byte, err error) {
	if err := clearSnapshot(own); err != nil { // files of an abandoned snapshot
		return nil, err
	}
	defer func() { err = errors.Join(err, clearSnapshot(own)) }()
	f, err := own.OpenFile(memoryFile, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make the placeholder for memory: %w", err)
	}
	if err := f.Close(); err != nil {
		return nil, err
	}
	err = a.put(ctx, "vm.snapshot", map[string]string{"destination_url": "file://" + fdPath(ownFD)})
	if err == nil {
		return nil, core.Errorf(core.Internal, core.CodeVMMFailed, "cloud-hypervisor ignored the placeholder for memory and wrote a complete snapshot: this build of it cannot be used")
	}
	if !metPlaceholder(err) {
		return nil, err
	}
	if state, err = readSnapshot(own, stateFile); err != nil {
		return nil, err
	}
	config, err := readSnapshot(own, configFile)
	if err != nil {
		return nil, err
	}
	for name, b := range map[string][]byte{configFile: config, stateFile: state} {
		if !json.Valid(b) {
			return nil, core.Errorf(core.Internal, core.CodeVMMFailed, "the file %s of a snapshot, with %d bytes, is not complete: is the disk of cloud-hypervisor full?", name, len(b))
		}
	}
	return state, nil
}

// metPlaceholder recognizes the one failure of a snapshot that is a success: memory-ranges, and no other file, exists
// already.
func metPlaceholder(err error) bool {
	r, ok := errors.AsType[*refusal](err)
	if !ok || r.status != http.StatusInternalServerError || len(r.chain) < 2 {
		return false
	}
	n := len(r.chain)
	return strings.HasPrefix(r.chain[n-1], "File exists") && strings.Contains(r.chain[n-2], "/"+memoryFile+`"`)
}

func clearSnapshot(own *os.Root) error {
	var errs []error
	for _, name := range []string{configFile, stateFile, memoryFile} {
		if err := own.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// readSnapshot reads a file that the VMM has written. The VMM may have written anything into it, or put anything into
// its place.
func readSnapshot(own *os.Root, name string) ([]byte, error) {
	info, err := own.Lstat(name)
	if err != nil {
		return nil, core.Wrapf(err, core.Internal, core.CodeVMMFailed, "cloud-hypervisor did not write %s of a snapshot", name)
	}
	if !info.Mode().IsRegular() || info.Size() > maxState {
		return nil, core.Errorf(core.Internal, core.CodeVMMFailed, "cloud-hypervisor's %s of a snapshot is not a regular file of at most %d bytes", name, maxState)
	}
	f, err := own.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxState))
}

// restorable stops the guest's clock for the time since the capture: CLOCK_MONOTONIC of a fork continues from the
// checkpoint's, as under QEMU. Everything else stays unchanged, byte by byte, because many numbers do not fit into a
// float64. These releases skip holes by themselves, so they read nothing over the base.
func (placeholder) restorable(state []byte) ([]byte, error) {
	var root node
	if err := json.Unmarshal(state, &root); err != nil {
		return nil, damaged(err)
	}
	var components map[string]json.RawMessage
	if err := json.Unmarshal(root.Snapshots, &components); err != nil {
		return nil, damaged(err)
	}
	for _, c := range []string{"cpu-manager", "memory-manager", "device-manager"} {
		if _, there := components[c]; !there { // without it, the component would be restored as if it had never run
			return nil, damaged(fmt.Errorf("it has no %s", c))
		}
	}
	if err := root.edit(stopClock); err != nil {
		return nil, damaged(err)
	}
	return json.Marshal(root)
}

func damaged(err error) error {
	return core.Wrapf(err, core.DataLoss, core.CodeCheckpointCorrupt, "the device state does not come from cloud-hypervisor: %v", err)
}

// node is a node of the tree in state.json. The saved state of a component is JSON in a string.
type node struct {
	Snapshots json.RawMessage `json:"snapshots"`
	Data      *struct {
		State string `json:"state"`
	} `json:"snapshot_data"`
}

// edit changes fields of a component's saved state.
func (n *node) edit(change func(map[string]json.RawMessage) error) error {
	if n == nil || n.Data == nil {
		return errors.New("a component has saved nothing")
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal([]byte(n.Data.State), &fields); err != nil {
		return err
	}
	if err := change(fields); err != nil {
		return err
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(fields); err != nil {
		return err
	}
	n.Data.State = strings.TrimSuffix(b.String(), "\n")
	return nil
}

// The saved clock is struct kvm_clock_data of linux/kvm.h, written byte by byte. Its flags are four bytes, beginning
// with the ninth. With one of them, setting the clock adds the wall time since it was read.
const (
	clockBytes    = 48
	clockFlags    = 8
	clockRealtime = 1 << 2 // KVM_CLOCK_REALTIME
)

// stopClock removes that flag from the saved clock.
func stopClock(fields map[string]json.RawMessage) error {
	if fields["clock"] == nil || string(fields["clock"]) == "null" {
		return nil
	}
	var clock map[string][]uint16 // by the hypervisor's name; not uint8, because that would be encoded in base64
	if err := json.Unmarshal(fields["clock"], &clock); err != nil {
		return fmt.Errorf("clock: %w", err)
	}
	for who, c := range clock {
		if len(c) != clockBytes {
			return fmt.Errorf("the clock of %q has %d bytes, not %d", who, len(c), clockBytes)
		}
		c[clockFlags] &^= clockRealtime
	}
	b, err := json.Marshal(clock)
	fields["clock"] = b
	return err
}
