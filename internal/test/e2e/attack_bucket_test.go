package e2e

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	coppice "github.com/coppice-dev/coppice/sdk/go"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// spoil changes the object at path, whose bytes are whole, or what is in its place. The path is free before.
type spoil struct {
	name string
	do   func(path string, whole []byte) error
}

// prey is an imported checkpoint that the host has never read: whatever is to run of it must come from the bucket.
type prey struct {
	id       coppice.CheckpointID
	manifest string // the path of its manifest
	packs    []pack
}

// pack is an object with frames, in the order of their places.
type pack struct {
	path  string
	guest []manifest.Frame // of memory, disk and device state
	root  []manifest.Frame // of the root file system and of nothing else
}

const keptFile = "/root/kept" // in the guest that is captured

// bucket changes what is stored of a checkpoint that the host must fetch. It is refused, nothing of it runs, and it can be forked when
// the bytes are as they were. Each object is attacked in an import of its own, which the host has never had. From the first change on no
// fork succeeds until the object is whole again, so the host cannot keep what it has read before.
func (x *assault) bucket() {
	want := fmt.Sprintf("%x", sha256.Sum256([]byte(keptFile)))
	x.sh("printf %s " + keptFile + " > " + keptFile + " && sync")
	first := x.capture("stored")
	x.sh("echo more >> /root/other && sync")
	second := x.capture("stored-later")
	file := x.export(first.ID)
	codes := map[string]int{}
	strangers := x.strangers(second.ID)

	// The manifest.
	p := x.newPrey(file)
	x.spoilAll(p.id, "the manifest", p.manifest, manifestSpoils(strangers), codes)
	x.wholeAgain(&p, "the manifest", want)

	// Packs, at frames that the guest needs. The first two attacks are on the root file system, which the host must not have yet.
	p = x.newPrey(file)
	x.noRoots()
	at := slices.IndexFunc(p.packs, func(p pack) bool { return len(p.root) > 0 })
	if at < 0 {
		x.t.Fatal("no pack has a frame of the root file system alone")
	}
	x.spoilAll(p.id, "a pack with the root file system", p.packs[at].path, frameSpoils(p.packs[at].root), codes)
	x.noRoots() // so each of these forks had to read it
	x.wholeAgain(&p, "a pack with the root file system", want)
	for _, part := range []string{"first", "middle", "last"} {
		p = x.newPrey(file)
		with := slices.DeleteFunc(slices.Clone(p.packs), func(p pack) bool { return len(p.guest) == 0 })
		if len(with) < 3 {
			x.t.Fatalf("%d packs have frames that a guest needs", len(with))
		}
		o := with[map[string]int{"first": 0, "middle": len(with) / 2, "last": len(with) - 1}[part]]
		other := with[0]
		if part == "first" {
			other = with[1]
		}
		spoils := frameSpoils(o.guest)
		if part == "middle" {
			spoils = slices.Concat(spoils, placeSpoils(), strangers, []spoil{{"is another pack of the checkpoint", func(path string, _ []byte) error {
				b, err := os.ReadFile(other.path)
				return errors.Join(err, os.WriteFile(path, b, 0o600))
			}}})
		}
		x.spoilAll(p.id, "the "+part+" pack", o.path, spoils, codes)
		x.wholeAgain(&p, "the "+part+" pack", want)
	}
	x.harmless(file, want)
	x.t.Logf("why forks were refused: %v", codes)
}

// spoilAll puts one after the other in the place of an object. Each fork is refused, for what is wrong in the store. At last the object is whole.
func (x *assault) spoilAll(id coppice.CheckpointID, what, path string, spoils []spoil, codes map[string]int) {
	x.t.Helper()
	whole, err := os.ReadFile(path)
	if err != nil {
		x.t.Fatal(err)
	}
	for _, s := range spoils {
		if err := os.RemoveAll(path); err != nil {
			x.t.Fatal(err)
		}
		if err := s.do(path, whole); err != nil {
			x.t.Fatalf("%s %s: %v", what, s.name, err)
		}
		code, err := x.cannotFork(id)
		codes[code]++
		x.held("bucket", what+" "+s.name, err)
	}
	if err := errors.Join(os.RemoveAll(path), os.WriteFile(path, whole, 0o600)); err != nil {
		x.t.Fatal(err)
	}
}

// wholeAgain wants a fork of a checkpoint that is as it was to succeed, with what was captured. The checkpoint is deleted.
func (x *assault) wholeAgain(p *prey, what, want string) {
	x.t.Helper()
	x.held("bucket", what+" is whole again", x.forksRight(p.id, want))
	if err := x.mallory.DeleteCheckpoint(x.t.Context(), p.id); err != nil {
		x.t.Error(err)
	}
}

// forksRight forks a checkpoint and looks whether the child has what was captured.
func (x *assault) forksRight(id coppice.CheckpointID, want string) error {
	ctx, cancel := context.WithTimeout(x.t.Context(), 3*time.Minute)
	defer cancel()
	res, err := x.mallory.ForkCheckpoint(ctx, id, coppice.ForkCheckpointRequest{})
	if err == nil && (len(res.Children) != 1 || res.Children[0].Problem != nil) {
		err = fmt.Errorf("%+v", res.Children)
	}
	if err != nil {
		return err
	}
	child := res.Children[0].Workspace.ID
	out, err := x.mallory.Exec(ctx, child, coppice.ExecRequest{Command: []string{"sha256sum", keptFile}})
	if err == nil && !strings.Contains(out.Stdout, want) {
		err = fmt.Errorf("the child has other bytes: %q, %q", out.Stdout, out.Stderr)
	}
	if len(x.roots()) == 0 {
		err = errors.Join(err, errors.New("the child's root file system is not where this test looks for it"))
	}
	_, err2 := x.mallory.TerminateWorkspace(ctx, child)
	return errors.Join(err, err2)
}

// harmless puts more into the bucket than belongs there. It may be refused; a child that is made has what was captured.
func (x *assault) harmless(file []byte, want string) {
	longer := func(path string) error {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.Write(bytes.Repeat([]byte("x"), 1<<20))
		return errors.Join(err, f.Close())
	}
	for name, do := range map[string]func(p prey) error{
		"a pack that goes on":                       func(p prey) error { return longer(p.packs[0].path) },
		"a manifest that goes on":                   func(p prey) error { return longer(p.manifest) },
		"a pack with 64 GiB of holes behind it":     func(p prey) error { return os.Truncate(p.packs[0].path, 64<<30) },
		"a manifest with 64 GiB of holes behind it": func(p prey) error { return os.Truncate(p.manifest, 64<<30) },
		"objects that nobody stored": func(p prey) error {
			dir := filepath.Dir(p.manifest)
			return errors.Join(os.WriteFile(filepath.Join(dir, "pack-999"), []byte("x"), 0o600), os.WriteFile(filepath.Join(dir, "manifest.1"), []byte("x"), 0o600),
				os.Symlink("/etc/shadow", filepath.Join(dir, "pack-998")))
		},
	} {
		p := x.newPrey(file)
		if err := do(p); err != nil {
			x.t.Fatal(err)
		}
		code, err := x.cannotFork(p.id)
		if errors.Is(err, errForked) {
			code, err = "", x.forksRight(p.id, want)
		}
		x.t.Logf("%s: %s", name, cmp.Or(code, "it is forked, and right"))
		x.held("bucket", name, err)
		if err := x.mallory.DeleteCheckpoint(x.t.Context(), p.id); err != nil {
			x.t.Error(err)
		}
	}
}

// manifestSpoils are changes to a manifest. It is believed by its digest alone, so that any change counts.
func manifestSpoils(strangers []spoil) []spoil {
	list := slices.Concat(placeSpoils(), strangers, []spoil{
		{"names another project", func(path string, whole []byte) error {
			return rewrite(path, whole, func(h *manifest.Header) { h.ProjectID = "prj_00000000000000000000000001" })
		}},
		{"has an image without end", func(path string, whole []byte) error {
			return rewrite(path, whole, func(h *manifest.Header) { h.Images[0].Bytes = manifest.MaxImageBytes })
		}},
	})
	for part := range 12 { // of the whole
		list = append(list, spoil{fmt.Sprintf("has a byte changed after %d of 12 parts", part), func(path string, whole []byte) error {
			b := bytes.Clone(whole)
			b[len(b)*part/12] ^= 0x10
			return os.WriteFile(path, b, 0o600)
		}}, spoil{fmt.Sprintf("is cut after %d of 12 parts", part), func(path string, whole []byte) error {
			return os.WriteFile(path, whole[:len(whole)*part/12], 0o600)
		}})
	}
	return append(list, spoil{"is cut before its last byte", func(path string, whole []byte) error { return os.WriteFile(path, whole[:len(whole)-1], 0o600) }})
}

// rewrite stores a manifest that is well-formed and says something else.
func rewrite(path string, whole []byte, change func(h *manifest.Header)) error {
	h, nodes, err := manifest.Decode(whole)
	if err != nil {
		return err
	}
	change(&h)
	b, err := manifest.Encode(h, nodes)
	if err != nil { // even the format has no room for it: the old one with another first byte
		b = append([]byte{whole[0] ^ 1}, whole[1:]...)
	}
	return os.WriteFile(path, b, 0o600)
}

// placeSpoils have something else in the place of an object.
func placeSpoils() []spoil {
	return []spoil{
		{"is gone", func(string, []byte) error { return nil }},
		{"is empty", func(path string, _ []byte) error { return os.WriteFile(path, nil, 0o600) }},
		{"has other bytes", func(path string, whole []byte) error {
			return os.WriteFile(path, bytes.Repeat([]byte("x"), len(whole)), 0o600)
		}},
		{"is 64 GiB of zeros", func(path string, _ []byte) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 64<<30))
		}},
		{"is a link to a file of the host", func(path string, _ []byte) error { return os.Symlink("/etc/shadow", path) }},
		{"is a link to a device without end", func(path string, _ []byte) error { return os.Symlink("/dev/zero", path) }},
		{"is a FIFO", func(path string, _ []byte) error { return unix.Mkfifo(path, 0o600) }},
		{"is a socket", func(path string, _ []byte) error { return unix.Mknod(path, unix.S_IFSOCK|0o600, 0) }},
		{"is a directory", func(path string, _ []byte) error { return os.Mkdir(path, 0o700) }},
	}
}

// frameSpoils change bytes of frames that the host must read, at many places, and cut the object before the last of them ends.
func frameSpoils(frames []manifest.Frame) []spoil {
	last := frames[len(frames)-1]
	end := last.Offset + last.Length
	var list []spoil
	flip := func(name string, at int64) {
		list = append(list, spoil{fmt.Sprintf("has byte %d changed, %s", at, name), func(path string, whole []byte) error {
			b := bytes.Clone(whole)
			b[at] ^= 0x10
			return os.WriteFile(path, b, 0o600)
		}})
	}
	flip("the first that is needed", frames[0].Offset)
	flip("the last that is needed", end-1)
	for part := range 5 {
		f := frames[len(frames)*part/5]
		flip("within a frame", f.Offset+f.Length/2)
	}
	for part := range 6 {
		n := frames[0].Offset + (end-frames[0].Offset)*int64(part)/6
		list = append(list, spoil{fmt.Sprintf("is cut at byte %d", n), func(path string, whole []byte) error { return os.WriteFile(path, whole[:n], 0o600) }})
	}
	list = append(list, spoil{"is cut before its last needed byte", func(path string, whole []byte) error { return os.WriteFile(path, whole[:end-1], 0o600) }})
	if len(frames) > 1 {
		list = append(list, spoil{"has two frames swapped", func(path string, whole []byte) error {
			b := bytes.Clone(whole)
			f, n := frames[0], min(frames[0].Length, last.Length)
			copy(b[f.Offset:f.Offset+n], whole[last.Offset:])
			copy(b[last.Offset:last.Offset+n], whole[f.Offset:f.Offset+n])
			return os.WriteFile(path, b, 0o600)
		}}, spoil{"has zeros for a frame", func(path string, whole []byte) error {
			b := bytes.Clone(whole)
			clear(b[last.Offset:end])
			return os.WriteFile(path, b, 0o600)
		}})
	}
	return list
}

// strangers put objects in the place of another that are good where they belong: of another tenant, and of another checkpoint of the
// attacker's own, as a bucket does that gives back what it had at another time.
func (x *assault) strangers(later coppice.CheckpointID) (list []spoil) {
	x.t.Helper()
	for whose, id := range map[string]coppice.CheckpointID{"another tenant's": x.alice.ids["ckpt"], "a later checkpoint's": later} {
		for _, from := range x.objectsOf(id) {
			b, err := os.ReadFile(from)
			if err != nil {
				x.t.Fatal(err)
			}
			list = append(list, spoil{"is " + whose + " " + filepath.Base(from), func(path string, _ []byte) error { return os.WriteFile(path, b, 0o600) }})
		}
	}
	const most = 12
	slices.SortFunc(list, func(a, b spoil) int { return strings.Compare(a.name, b.name) })
	return list[:min(len(list), most)]
}

// newPrey imports a file. The host has nothing of it.
func (x *assault) newPrey(file []byte) prey {
	x.t.Helper()
	cp, err := x.bring(file)
	if err != nil {
		x.t.Fatal(err)
	}
	p := prey{id: cp.ID}
	objects := x.objectsOf(cp.ID)
	for _, path := range objects {
		if strings.HasPrefix(filepath.Base(path), "manifest") {
			p.manifest = path
		}
	}
	b, err := os.ReadFile(p.manifest)
	if err != nil {
		x.t.Fatalf("%v among %q", err, objects)
	}
	h, nodes, err := manifest.Decode(b)
	if err != nil {
		x.t.Fatal(err)
	}
	trees, err := h.Trees(nodes)
	if err != nil {
		x.t.Fatal(err)
	}
	guest, root := map[manifest.Frame]bool{}, map[manifest.Frame]bool{}
	for name, tree := range trees {
		for r := range tree.Runs() {
			if name == runnerapi.ImageRoot {
				root[*r.Frame] = true
			} else {
				guest[*r.Frame] = true
			}
		}
	}
	for _, path := range objects {
		o := pack{path: path}
		for f := range guest {
			if strings.HasSuffix(path, "/"+f.Object) {
				o.guest = append(o.guest, f)
			}
		}
		for f := range root {
			if strings.HasSuffix(path, "/"+f.Object) && !guest[f] {
				o.root = append(o.root, f)
			}
		}
		for _, list := range [][]manifest.Frame{o.guest, o.root} {
			slices.SortFunc(list, func(a, b manifest.Frame) int { return cmp.Compare(a.Offset, b.Offset) })
		}
		if len(o.guest)+len(o.root) > 0 {
			p.packs = append(p.packs, o)
		}
	}
	return p
}

// roots are the root file systems from the store that the host has.
func (x *assault) roots() (list []string) {
	x.t.Helper()
	entries, err := os.ReadDir(filepath.Join(x.alice.watch.runnerDir(), "roots"))
	if err != nil {
		x.t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "stored-") {
			list = append(list, e.Name())
		}
	}
	return list
}

// noRoots waits until the host has no root file system from the store.
func (x *assault) noRoots() {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(x.t.Context(), 2*time.Minute)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		found := x.roots()
		if len(found) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			x.t.Fatalf("the host has root file systems from the store: %q", found)
		}
	}
}

// objectsOf are the files of a checkpoint in the store, in the order of their names.
func (x *assault) objectsOf(id coppice.CheckpointID) (list []string) {
	x.t.Helper()
	if err := filepath.WalkDir(x.store, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(path, "/"+id+"/") {
			list = append(list, path)
		}
		return err
	}); err != nil {
		x.t.Fatal(err)
	}
	if len(list) < 2 {
		x.t.Fatalf("checkpoint %s has the objects %q", id, list)
	}
	return list
}

var errForked = errors.New("it was forked")

// storeCodes are the codes of a refused fork whose checkpoint is not whole in the store. A fork
// with another code may have failed for another reason than the attack.
var storeCodes = []coppice.Code{"CHECKPOINT_CORRUPT", "CHECKPOINT_INCOMPLETE", "MANIFEST_INVALID", "STORE_UNAVAILABLE"}

// cannotFork wants a fork to fail in time, because of what is in the store.
func (x *assault) cannotFork(id coppice.CheckpointID) (string, error) {
	ctx, cancel := context.WithTimeout(x.t.Context(), 90*time.Second)
	defer cancel()
	code, forked, err := x.tryFork(ctx, id)
	switch {
	case forked:
		return code, errForked
	case code == "":
		return code, fmt.Errorf("it did not fail in time: %w", err)
	case !slices.Contains(storeCodes, coppice.Code(code)):
		return code, fmt.Errorf("it failed by something else: %w", err)
	}
	return code, nil
}

// tryFork forks a checkpoint once and ends the child. It returns the code of what a refusal said.
func (x *assault) tryFork(ctx context.Context, id coppice.CheckpointID) (code string, forked bool, err error) {
	res, err := x.mallory.ForkCheckpoint(ctx, id, coppice.ForkCheckpointRequest{})
	for _, c := range res.Children {
		if c.Workspace != nil && c.Problem == nil {
			forked = true
			if _, err := x.mallory.TerminateWorkspace(x.t.Context(), c.Workspace.ID); err != nil {
				x.t.Error(err)
			}
		} else if c.Problem != nil {
			err = errors.Join(err, c.Problem.Err())
		}
	}
	if e := (*coppice.Error)(nil); errors.As(err, &e) {
		x.take([]byte(e.Error()))
		code = string(e.Code)
	}
	return code, forked, err
}
