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

// strategy is how device state is taken from a release of cloud-hypervisor, and given back to it, without memory.
type strategy interface {
	// capture has a paused VMM write its state into the directory of its own, and returns it. Nothing is left in the directory.
	capture(ctx context.Context, a api, own *os.Root) ([]byte, error)
	// restorable makes of a captured state what a restore reads as state.json. Beside it there is a memory-ranges as large as RAM with
	// the delta in its places and holes in all others, where RAM stays as the zone's file has it.
	restorable(state []byte) ([]byte, error)
}

// strategyFor chooses by version.
func strategyFor(version string) (strategy, error) {
	switch n := major(version); {
	case n < 53:
		return nil, core.Errorf(core.FailedPrecondition, core.CodeVMMFailed, "cloud-hypervisor %s does not drain a disk's requests when it is paused; Coppice needs %s: run `make setup-kvm`", version, Supported)
	case n > 53:
		return nil, core.Errorf(core.FailedPrecondition, core.CodeVMMFailed, "cloud-hypervisor %s is newer than what Coppice knows how to take device state from; it needs %s: run `make setup-kvm`", version, Supported)
	}
	return placeholder{}, nil
}

// strategy chooses by what the VMM itself says: one that an earlier runner started may be of another release than what is installed now.
func (a api) strategy(ctx context.Context) (strategy, error) {
	b, err := a.get(ctx, "vmm.ping")
	if err != nil {
		return nil, err
	}
	var ping struct {
		Version string `json:"version"`
	}
	if err := json.Unmarshal(b, &ping); err != nil {
		return nil, core.Wrapf(err, core.Internal, core.CodeVMMFailed, "cloud-hypervisor's answer to vmm.ping is not understood")
	}
	return strategyFor(ping.Version)
}

// The files of a snapshot.
const (
	configFile = "config.json"
	stateFile  = "state.json"
	memoryFile = "memory-ranges"
)

// placeholder is the strategy for releases that have no snapshot without memory. They write config.json, then state.json, and only then
// create the file for memory, which must not be there: where it is, the snapshot fails on it after both are complete, no page
// was touched, and the machine is paused as before.
type placeholder struct{}

// maxState bounds a state: one of a machine with two vCPUs has 100 KiB or so, and a vCPU some 30 KiB.
const maxState = 16 << 20

func (placeholder) capture(ctx context.Context, a api, own *os.Root) (state []byte, err error) {
	if err := clearSnapshot(own); err != nil { // of one that was given up
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
		return nil, core.Errorf(core.Internal, core.CodeVMMFailed, "cloud-hypervisor has not met the placeholder for memory and has written a snapshot of its own: this build of it cannot be used")
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
			return nil, core.Errorf(core.Internal, core.CodeVMMFailed, "%s, %d bytes, which cloud-hypervisor has written for a snapshot is not whole: is its disk full?", name, len(b))
		}
	}
	return state, nil
}

// metPlaceholder tells the one failure of a snapshot that is a success: that memory-ranges exists, and of no other file.
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

// readSnapshot reads a file that the VMM has written, and may have written anything into, or put anything in the place of.
func readSnapshot(own *os.Root, name string) ([]byte, error) {
	info, err := own.Lstat(name)
	if err != nil {
		return nil, core.Wrapf(err, core.Internal, core.CodeVMMFailed, "cloud-hypervisor has not written %s of a snapshot", name)
	}
	if !info.Mode().IsRegular() || info.Size() > maxState {
		return nil, core.Errorf(core.Internal, core.CodeVMMFailed, "what cloud-hypervisor has written as %s of a snapshot is no file of at most %d bytes", name, maxState)
	}
	f, err := own.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxState))
}

// restorable stops the guest's clock for the time since the capture: CLOCK_MONOTONIC of a fork goes on from the checkpoint's, as it does
// under QEMU. All else stays as it is, byte by byte: many numbers do not fit into a float64. That holes are skipped, and so nothing of
// the base is read, these releases do by themselves.
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
		if _, there := components[c]; !there { // it would be restored as if it had never run
			return nil, damaged(fmt.Errorf("it has no %s", c))
		}
	}
	if err := root.edit(stopClock); err != nil {
		return nil, damaged(err)
	}
	return json.Marshal(root)
}

func damaged(err error) error {
	return core.Wrapf(err, core.DataLoss, core.CodeCheckpointCorrupt, "the device state is not one of cloud-hypervisor's: %v", err)
}

// node is a node of the tree in state.json. What a component saved is JSON in a string.
type node struct {
	Snapshots json.RawMessage `json:"snapshots"`
	Data      *struct {
		State string `json:"state"`
	} `json:"snapshot_data"`
}

// edit changes fields of what a component saved.
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

// The saved clock is struct kvm_clock_data of linux/kvm.h, written byte by byte. Its flags are four bytes from the ninth on, of which
// one says that a clock that is set goes forward by the wall time since it was read.
const (
	clockBytes    = 48
	clockFlags    = 8
	clockRealtime = 1 << 2 // KVM_CLOCK_REALTIME
)

// stopClock takes the flag from the saved clock.
func stopClock(fields map[string]json.RawMessage) error {
	if fields["clock"] == nil || string(fields["clock"]) == "null" {
		return nil
	}
	var clock map[string][]uint16 // by the hypervisor's name; an array of uint8 would be written in base64
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
