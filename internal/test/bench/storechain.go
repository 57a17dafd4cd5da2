package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	coppice "github.com/coppice-dev/coppice/sdk/go"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/bloburl"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

const pageSize = manifest.PageSize

// history is the memory of a machine at each checkpoint of a chain.
type history struct {
	first []byte    // all of it at the first
	steps []pageSet // what differs at each further one from the one before
}

// pageSet is a set of pages, by number, with their content.
type pageSet struct {
	pages []int64
	bytes []byte
}

// to changes an image from its state before a step to that after it.
func (d pageSet) to(image []byte) {
	for i, page := range d.pages {
		copy(image[page*pageSize:], d.bytes[i*pageSize:(i+1)*pageSize])
	}
}

func (d pageSet) ranges() []snapshotstore.Range {
	out := make([]snapshotstore.Range, 0, len(d.pages))
	for _, page := range d.pages {
		out = append(out, snapshotstore.Range{Offset: page * pageSize, Length: pageSize})
	}
	return out
}

// differing returns the pages of now that differ from before.
func differing(before, now []byte) (d pageSet) {
	for at := 0; at < len(now); at += pageSize {
		if page := now[at : at+pageSize]; !bytes.Equal(page, before[at:at+pageSize]) {
			d.pages, d.bytes = append(d.pages, int64(at/pageSize)), append(d.bytes, page...)
		}
	}
	return d
}

// measureChain makes a machine work through a chain of checkpoints, and writes its memory to the store again.
func (b *storeBench) measureChain(ctx context.Context) error {
	b.say("a machine with %d MiB works through %d checkpoints", b.cfg.chainMiB, b.cfg.depth)
	ids, err := b.growChain(ctx)
	if err != nil {
		return err
	}
	b.say("read its memory at each")
	h, err := b.readHistory(ids)
	if err != nil {
		return err
	}
	at, err := b.s3.MakeBucket(ctx)
	if err != nil {
		return err
	}
	store, err := bloburl.Open(ctx, b.s3.URL(at), s3.Credentials{AccessKey: b.s3.AccessKey, SecretKey: b.s3.SecretKey})
	if err != nil {
		return err
	}
	err = b.replay(ctx, &replay{blobs: store, dir: b.dir, project: core.NewID[core.ProjectID]()}, h)
	return errors.Join(err, store.Close())
}

// growChain makes the checkpoints and returns them. The work is also done once before the first, so that its files are
// in the guest's page cache from then on.
func (b *storeBench) growChain(ctx context.Context) ([]coppice.CheckpointID, error) {
	c := b.pool.Client
	ws, err := c.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Image: b.cfg.image, Resources: coppice.ResourcesRequest{MemoryMiB: &b.cfg.chainMiB}})
	if err != nil {
		return nil, fmt.Errorf("create a workspace: %w", err)
	}
	var pauses, stored report.Samples
	var ids []coppice.CheckpointID
	for i := range b.cfg.depth + 1 {
		if err := b.exec(ctx, ws.ID, "sh", "-c", b.cfg.work, fmt.Sprint(i)); err != nil {
			return nil, err
		}
		cp, err := c.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{})
		if err != nil {
			return nil, fmt.Errorf("checkpoint %d: %w", i, err)
		}
		ids = append(ids, cp.ID)
		pauses.Add(cp.PauseMS)
	}
	if _, err := c.TerminateWorkspace(ctx, ws.ID); err != nil {
		return nil, err
	}
	b.say("wait until all are sealed")
	for _, id := range ids {
		cp, err := b.sealed(ctx, id)
		if err != nil {
			return nil, err
		}
		if id != ids[0] {
			stored.Add(float64(cp.StoredBytes) / 1024)
		}
	}
	b.report.Group("The chain as the runner made it", pauses.MS("pause", "with seals of earlier ones under way"),
		stored.Figure("stored for each", "KiB", "memory, disk, device state, survey and manifest"))
	return ids, nil
}

// sealed waits until a checkpoint is in the store.
func (b *storeBench) sealed(ctx context.Context, id coppice.CheckpointID) (coppice.Checkpoint, error) {
	cp, err := b.pool.Client.WaitSealed(ctx, id)
	if err == nil && cp.State != coppice.CheckpointSealed {
		err = fmt.Errorf("checkpoint %s is %s", id, cp.State)
	}
	return cp, err
}

func (b *storeBench) exec(ctx context.Context, id coppice.WorkspaceID, command ...string) error {
	out, err := b.pool.Client.Exec(ctx, id, coppice.ExecRequest{Command: command, Cwd: "/"})
	if err == nil && out.ExitCode != 0 {
		err = fmt.Errorf("status %d: %s", out.ExitCode, core.Clip(out.Stderr))
	}
	if err != nil {
		return fmt.Errorf("exec %s: %w", command[0], err)
	}
	return nil
}

func (b *storeBench) readHistory(ids []coppice.CheckpointID) (h history, err error) {
	var before []byte
	for i, id := range ids {
		now, err := b.home.Memory(id)
		if err != nil {
			return h, err
		}
		if i == 0 {
			h.first = now
		} else {
			h.steps = append(h.steps, differing(before, now))
		}
		before = now
	}
	return h, nil
}

// replay is the store's code alone: one image, on a real server.
type replay struct {
	blobs   blob.Blobs
	dir     string
	project core.ProjectID
}

// write stores an image against a reference, nil for none, whose bytes are before.
func (x *replay) write(ctx context.Context, ref *snapshotstore.Snapshot, before, now []byte, changed []snapshotstore.Range) (*snapshotstore.Written, error) {
	id := core.NewID[core.CheckpointID]()
	src := snapshotstore.Source{Name: "memory", Size: int64(len(now)), Changed: changed, Read: readerOf(now)}
	if ref != nil {
		src.Reference = readerOf(before)
	}
	h := manifest.Header{
		ProjectID: x.project, CheckpointID: id, CapturedAt: "2026-11-22T12:00:00Z", GuestImage: core.DigestOf(nil), Class: map[string]string{},
		Resources: core.Resources{VCPUs: 1, MemoryMiB: len(now) >> 20, DiskGiB: 1},
	}
	return snapshotstore.Write(ctx, x.blobs, fmt.Sprintf("v1/%s/%s/1/", x.project, id), h, ref, []snapshotstore.Source{src}, snapshotstore.Options{Dir: x.dir})
}

func readerOf(image []byte) func(p []byte, off int64) error {
	return func(p []byte, off int64) error {
		copy(p, image[off:])
		return nil
	}
}

// replay writes the history, and reads its end.
func (b *storeBench) replay(ctx context.Context, x *replay, h history) error {
	b.say("write it to the store once more, alone")
	now, before := bytes.Clone(h.first), bytes.Clone(h.first)
	var each, kib, took report.Samples
	cpu, wall := cpuSeconds(), time.Now()
	root, err := x.write(ctx, nil, nil, now, []snapshotstore.Range{{Length: int64(len(now))}})
	if err != nil {
		return err
	}
	raw, last := root.Dirty, root
	var dirtyBytes, stored, moved int64
	for _, step := range h.steps {
		step.to(now)
		began := time.Now()
		if last, err = x.write(ctx, last.Snapshot, before, now, step.ranges()); err != nil {
			return err
		}
		took.Add(report.Since(began))
		step.to(before)
		dirtyBytes, stored, moved = dirtyBytes+int64(len(step.bytes)), stored+last.Stored, moved+last.Moved
		raw += last.Dirty + last.Moved
		each.Add(float64(len(step.bytes)) / mib)
		kib.Add(float64(last.Stored) / 1024)
	}
	cpu, seconds := cpuSeconds()-cpu, time.Since(wall).Seconds()
	n := int64(len(h.steps))
	b.report.Group("The chain's memory written by the store alone",
		each.Figure("dirty pages of each", "MiB", "that differ from the checkpoint before"), kib.Figure("stored for each", "KiB", fmt.Sprintf("%.1f MiB of all were stored again to keep regions together", float64(moved)/mib)),
		took.MS("a write", ""))
	const allowance = 64 << 10 // for each checkpoint's manifest and map
	b.report.ratio("stored_over_dirty", float64(stored)/float64(dirtyBytes), 0.6+float64(n*allowance)/float64(dirtyBytes),
		fmt.Sprintf("%.1f MiB over %.1f MiB, %d checkpoints; 0.6 plus 64 KiB each", float64(stored)/mib, float64(dirtyBytes)/mib, n))
	if err := b.measureBaselines(ctx, h, float64(raw)/mib, cpu, seconds); err != nil {
		return err
	}
	return b.measureReads(ctx, x, h.first, now, root.Snapshot, last.Manifest)
}

// measureBaselines compares with ordinary programs on the same bytes.
func (b *storeBench) measureBaselines(ctx context.Context, h history, rawMiB, cpu, wall float64) error {
	b.say("the same bytes through sha256sum and zstd")
	path := filepath.Join(b.dir, "pages")
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	zero := make([]byte, len(h.first))
	_, err = f.Write(differing(zero, h.first).bytes)
	for _, step := range h.steps {
		if err == nil {
			_, err = f.Write(step.bytes)
		}
	}
	info, statErr := f.Stat()
	if err := errors.Join(err, statErr, f.Close()); err != nil {
		return err
	}
	size := float64(info.Size()) / mib
	perCore := func(mibs, seconds float64) report.Figure {
		return report.Samples{mibs / seconds}.Figure("", "MiB/s", "")
	}
	seal := perCore(rawMiB, cpu)
	seal.Name, seal.Note = "seal, per core", fmt.Sprintf("%.0f MiB of pages, compressed, hashed and sent to S3 in clear; %.0f MiB/s by the clock", rawMiB, rawMiB/wall)
	figures := []report.Figure{seal}
	plain := 0.0 // seconds for a MiB
	for _, command := range [][]string{{"sha256sum", path}, {"zstd", "-1", "-q", "--single-thread", "-c", path}} {
		program, err := exec.LookPath(command[0])
		if err != nil {
			b.report.NotMeasured = append(b.report.NotMeasured, command[0]+" is not installed")
			continue
		}
		var rates report.Samples
		for range 3 {
			cmd := exec.CommandContext(ctx, program, command[1:]...) //nolint:gosec // G204: two programs of the system
			if err := cmd.Run(); err != nil {
				return fmt.Errorf("%s: %w", command[0], err)
			}
			rates.Add(size / (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds())
		}
		plain += 1 / rates.Median()
		figures = append(figures, rates.Figure(command[0]+", per core", "MiB/s", "of CPU time, the same pages in one file"))
	}
	b.report.Group("Throughput", figures...)
	if len(figures) == 3 {
		b.report.ratio("seal_over_sha256_and_zstd", rawMiB/cpu*plain, 0, "")
	}
	return os.Remove(path)
}

// measureReads reads the end of the chain, in turns with the same bytes at depth 1.
func (b *storeBench) measureReads(ctx context.Context, x *replay, first, end []byte, root *snapshotstore.Snapshot, deep manifest.Ref) error {
	b.say("read the end of the chain, and the same bytes at depth 1, in turns")
	shallow, err := x.write(ctx, root, first, end, differing(first, end).ranges())
	if err != nil {
		return err
	}
	var times, opens [2]report.Samples
	var got [2]snapshotstore.Fetched
	for range b.cfg.reads {
		for i, ref := range []manifest.Ref{shallow.Manifest, deep} {
			image := make([]byte, len(end))
			began := time.Now()
			s, err := snapshotstore.Open(ctx, x.blobs, ref)
			if err != nil {
				return err
			}
			opens[i].Add(report.Since(began))
			got[i], err = snapshotstore.Fetch(ctx, x.blobs, s.Image("memory").Runs(), snapshotstore.FetchOptions{}, func(page int64, p []byte) error {
				copy(image[page*pageSize:], p)
				return nil
			})
			if err != nil {
				return err
			}
			times[i].Add(report.Since(began))
			if !bytes.Equal(image, end) {
				return errors.New("the store gave other bytes than it was given")
			}
		}
	}
	note := func(i int) string {
		return fmt.Sprintf("%.1f MiB in %d requests for %.1f MiB of pages", float64(got[i].Bytes)/mib, got[i].Requests, float64(got[i].Pages*pageSize)/mib)
	}
	b.report.Group("Opening and reading all of a memory image", opens[0].MS("open, depth 1", ""), opens[1].MS(fmt.Sprintf("open, depth %d", b.cfg.depth), ""),
		times[0].MS("open and read, depth 1", note(0)), times[1].MS(fmt.Sprintf("open and read, depth %d", b.cfg.depth), note(1)))
	b.report.ratio("depth_64_over_1", times[1].Median()/times[0].Median(), 1.1,
		fmt.Sprintf("open and read, ms: %.1f over %.1f (n=%d)", times[1].Median(), times[0].Median(), len(times[0])))
	return nil
}

// cpuSeconds is the CPU time of this process so far.
func cpuSeconds() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}
