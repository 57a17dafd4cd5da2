package images

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

var update = flag.Bool("update", false, "write new golden files")

func openStore(t *testing.T) *Store {
	t.Helper()
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// publishFake publishes an image of four small files, by the same steps as a build.
func publishFake(ctx context.Context, s *Store, name, content string, layers ...core.Digest) (_ Image, err error) {
	staging, err := s.Stage(ctx)
	if err != nil {
		return Image{}, err
	}
	defer func() { err = errors.Join(err, staging.Close()) }()
	out := filepath.Join(staging.Dir, "out")
	if err := os.Mkdir(out, 0o700); err != nil {
		return Image{}, err
	}
	m := Manifest{
		Architecture: "amd64", KernelRelease: "6.1.0-test", CommandLine: "quiet", RootFSType: "erofs",
		Files: map[string]File{}, Recipe: Recipe{Version: RecipeVersion, Source: SourceDebian, KernelPackage: "k=1", Layers: layers},
	}
	for _, file := range imageFiles() {
		text := []byte(file + " of " + content)
		if err := os.WriteFile(filepath.Join(out, file), text, 0o600); err != nil {
			return Image{}, err
		}
		m.Files[file] = File{core.DigestOf(text), int64(len(text))}
	}
	img, err := staging.Publish(ctx, out, m)
	if err != nil {
		return Image{}, err
	}
	img.Name = name
	return img, staging.Name(name, img.Digest)
}

func mustPublish(t *testing.T, s *Store, name, content string, layers ...core.Digest) Image {
	t.Helper()
	img, err := publishFake(t.Context(), s, name, content, layers...)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// names returns "name content-digest" of what List finds.
func listed(t *testing.T, s *Store) []string {
	t.Helper()
	list, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	out := []string{}
	for _, img := range list {
		out = append(out, img.Name+" "+img.Digest.Short())
	}
	return out
}

func TestStore(t *testing.T) {
	t.Parallel()
	s := openStore(t)
	if got := listed(t, s); len(got) != 0 {
		t.Fatalf("a new store holds %q", got)
	}
	a := mustPublish(t, s, "base", "a")
	b := mustPublish(t, s, "demo", "b")
	if again := mustPublish(t, s, "base", "a"); again.Digest != a.Digest || !again.CreatedAt.Equal(a.CreatedAt) {
		t.Errorf("the same content was published twice: %v and %v", again, a)
	}
	if diff := cmp.Diff([]string{"base " + a.Digest.Short(), "demo " + b.Digest.Short()}, listed(t, s)); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}
	for _, ref := range []string{"base", string(a.Digest), "sha256:" + a.Digest.Hex()[:8]} {
		got, err := s.Get(ref)
		if err != nil || got.Digest != a.Digest || got.Kernel != filepath.Join(a.Dir, "vmlinuz") || got.KernelRelease != "6.1.0-test" {
			t.Errorf("Get(%q) = %+v, %v", ref, got, err)
		}
	}
	info, err := os.Stat(a.RootFS)
	if err != nil || info.Mode() != 0o444 {
		t.Errorf("the root file system has mode %v, %v, want read-only for all", info.Mode(), err)
	}
	for ref, code := range map[string]core.Code{
		"none": core.CodeImageNotFound, "": core.CodeInvalidName, "../names/base": core.CodeInvalidName, "Base": core.CodeInvalidName,
		"sha256:" + strings.Repeat("0", 64): core.CodeImageNotFound, "sha256:12": core.CodeInvalidDigest, "sha256:../../x": core.CodeInvalidDigest,
	} {
		if _, err := s.Get(ref); core.CodeOf(err) != code {
			t.Errorf("Get(%q): err = %v, want %s", ref, err, code)
		}
	}
}

func TestStoreNames(t *testing.T) {
	t.Parallel()
	s := openStore(t)
	a := mustPublish(t, s, "one", "a")
	b := mustPublish(t, s, "other", "b")
	if err := s.Tag(t.Context(), "one", "two"); err != nil {
		t.Fatal(err)
	}
	if err := s.Tag(t.Context(), string(a.Digest), "other"); err != nil {
		t.Fatal(err)
	}
	want := []string{" " + b.Digest.Short(), "one " + a.Digest.Short(), "other " + a.Digest.Short(), "two " + a.Digest.Short()}
	if diff := cmp.Diff(want, listed(t, s)); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}
	for _, ref := range []string{"one", "other"} {
		if err := s.Remove(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Get("two"); err != nil {
		t.Errorf("the image went with its first name: %v", err)
	}
	if err := s.Remove(t.Context(), "two"); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), string(b.Digest)); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"two", string(a.Digest), string(b.Digest)} {
		if err := s.Remove(t.Context(), ref); core.CodeOf(err) != core.CodeImageNotFound {
			t.Errorf("Remove(%s) again: %v", ref, err)
		}
	}
	for _, name := range []string{"", "UPPER", "a/b", "tmp-"} {
		if err := s.Tag(t.Context(), string(a.Digest), name); core.CodeOf(err) != core.CodeInvalidName {
			t.Errorf("Tag(%q): %v", name, err)
		}
	}
}

func TestRemoveByDigestTakesTheNames(t *testing.T) {
	t.Parallel()
	s := openStore(t)
	a := mustPublish(t, s, "one", "a")
	if err := s.Tag(t.Context(), "one", "two"); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), string(a.Digest)); err != nil {
		t.Fatal(err)
	}
	if got := listed(t, s); len(got) != 0 {
		t.Errorf("the store holds %q", got)
	}
	checkTidy(t, s)
}

func TestDamageIsFound(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		damage func(Image) error
		deep   bool // only Verify can see it
	}{
		"byte of the root file system": {func(i Image) error { return overwrite(i.RootFS, "R") }, true},
		"byte of the overlay":          {func(i Image) error { return overwrite(i.Overlay, "O") }, true},
		"shorter kernel":               {func(i Image) error { return os.Truncate(i.Kernel, 3) }, false},
		"missing initrd":               {func(i Image) error { return os.Remove(i.Initrd) }, false},
		"link in place of the kernel": {func(i Image) error {
			return errors.Join(os.Rename(i.Kernel, i.Kernel+"2"), os.Symlink(i.Kernel+"2", i.Kernel))
		}, false},
		"byte of image.json": {func(i Image) error { return overwrite(filepath.Join(i.Dir, manifestFile), " ") }, false},
		"no image.json":      {func(i Image) error { return os.Remove(filepath.Join(i.Dir, manifestFile)) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := openStore(t)
			img := mustPublish(t, s, "base", "a")
			sound := mustPublish(t, s, "sound", "b")
			if err := s.Verify(t.Context(), img); err != nil {
				t.Fatalf("a sound image: %v", err)
			}
			if err := c.damage(img); err != nil {
				t.Fatal(err)
			}
			if err := s.Verify(t.Context(), img); core.CodeOf(err) != CodeImageCorrupt || !strings.Contains(err.Error(), "build it again") {
				t.Errorf("Verify = %v, want %s", err, CodeImageCorrupt)
			}
			_, err := s.Get("base")
			list, listErr := s.List()
			if c.deep {
				if err != nil || listErr != nil {
					t.Errorf("Get = %v, List = %v", err, listErr)
				}
				return
			}
			if core.CodeOf(err) != CodeImageCorrupt || listErr == nil || len(list) != 1 || list[0].Digest != sound.Digest {
				t.Errorf("Get = %v; List = %v, %v", err, list, listErr)
			}
			// Publishing the same image again heals it.
			if again := mustPublish(t, s, "base", "a"); again.Digest != img.Digest {
				t.Errorf("digest %s, want %s", again.Digest, img.Digest)
			}
			if err := s.Verify(t.Context(), img); err != nil {
				t.Errorf("after publishing it again: %v", err)
			}
			checkTidy(t, s)
		})
	}
}

func overwrite(path, text string) error {
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// checkTidy fails if anything temporary is in the store.
func checkTidy(t *testing.T, s *Store) {
	t.Helper()
	err := filepath.WalkDir(s.Dir(), func(path string, _ fs.DirEntry, err error) error {
		if base := filepath.Base(path); strings.HasPrefix(base, tempPrefix) || strings.HasPrefix(base, ".") {
			t.Errorf("%s was left behind", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// TestStoreInner is the process that TestStoreSurvivesKill kills.
func TestStoreInner(t *testing.T) {
	dir := os.Getenv("IMAGES_TEST_STORE")
	if dir == "" {
		return
	}
	if err := failpoint.ArmList(os.Getenv("IMAGES_TEST_FAIL")); err != nil {
		t.Fatal(err)
	}
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv("IMAGES_TEST_REMOVE") != "" {
		err = s.Remove(t.Context(), "base")
	} else {
		_, err = publishFake(t.Context(), s, "base", "new")
	}
	t.Fatalf("the process lived on: %v", err)
}

// TestStoreSurvivesKill kills a process between the steps of a publication and of a removal: the store must hold the
// state before or after, and the next writer must clean up.
func TestStoreSurvivesKill(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		point  string
		remove bool
		// want is the output of List right after the kill, by content.
		want []string
	}{
		{"images.before_publish", false, []string{"base old"}},
		{"images.after_publish", false, []string{" new", "base old"}},
		{"images.after_unname", true, []string{" old"}},
		{"images.after_discard", true, []string{}},
	} {
		t.Run(c.point, func(t *testing.T) {
			t.Parallel()
			s := openStore(t)
			contents := map[string]string{mustPublish(t, s, "base", "old").Digest.Short(): "old"}
			scratch := openStore(t)
			contents[mustPublish(t, scratch, "base", "new").Digest.Short()] = "new"
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestStoreInner$", "-test.v")
			cmd.Env = append(os.Environ(), "IMAGES_TEST_STORE="+s.Dir(), "IMAGES_TEST_FAIL="+c.point+"=kill")
			if c.remove {
				cmd.Env = append(cmd.Env, "IMAGES_TEST_REMOVE=1")
			}
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("the process ended with %v, want a kill\n%s", err, out)
			}
			got := []string{}
			for _, line := range listed(t, s) {
				name, digest, _ := strings.Cut(line, " ")
				got = append(got, name+" "+contents[digest])
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("after the kill (-want +got):\n%s", diff)
			}
			for _, img := range mustList(t, s) {
				if err := s.Verify(t.Context(), img); err != nil {
					t.Error(err)
				}
			}
			if img := mustPublish(t, s, "base", "new"); s.Verify(t.Context(), img) != nil {
				t.Error("the next publication is not sound")
			}
			checkTidy(t, s)
		})
	}
}

func mustList(t *testing.T, s *Store) []Image {
	t.Helper()
	list, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestFailedStepsLeaveNothing(t *testing.T) {
	// Not parallel: failpoints are the whole process's.
	for _, point := range []string{"images.before_publish", "images.after_publish"} {
		t.Run(point, func(t *testing.T) {
			s := openStore(t)
			armed, err := failpoint.Arm(point, failpoint.Action{Kind: failpoint.Fail})
			if err != nil {
				t.Fatal(err)
			}
			_, err = publishFake(t.Context(), s, "base", "a")
			armed.Disarm()
			if !errors.Is(err, failpoint.ErrInjected) {
				t.Fatalf("err = %v", err)
			}
			if _, err := s.Get("base"); core.CodeOf(err) != core.CodeImageNotFound {
				t.Errorf("the name was written: %v", err)
			}
			checkTidy(t, s)
		})
	}
}

func TestWritersWaitForEachOther(t *testing.T) {
	t.Parallel()
	s := openStore(t)
	unlock, err := s.lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*lockPoll)
	defer cancel()
	if _, err := publishFake(ctx, s, "base", "a"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a writer beside another one: %v", err)
	}
	time.AfterFunc(2*lockPoll, unlock)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			other, err := Open(s.Dir())
			if err == nil {
				_, err = publishFake(t.Context(), other, fmt.Sprintf("n%d", i), fmt.Sprint(i%3))
			}
			if err == nil && i%2 == 0 {
				err = other.Remove(t.Context(), fmt.Sprintf("n%d", i))
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	// Readers need no lock and never see half an image.
	for range 50 {
		if _, err := s.List(); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	for _, img := range mustList(t, s) {
		if err := s.Verify(t.Context(), img); err != nil {
			t.Error(err)
		}
	}
	checkTidy(t, s)
}

func TestManifestEncodingIsStable(t *testing.T) {
	t.Parallel()
	m := Manifest{
		Format: 1, Architecture: "amd64", KernelRelease: "6.1.0-1-cloud-amd64", CommandLine: "console=ttyS0 a<b>&c", RootFSType: "erofs",
		Files: map[string]File{},
		Recipe: Recipe{
			Version: 1, Source: SourceTar, TarDigest: core.DigestOf([]byte("tar")), KernelPackage: "linux-image=1", AgentDigest: core.DigestOf([]byte("agent")),
			Modules: []string{"virtio.ko"},
		},
	}
	for i, f := range imageFiles() {
		m.Files[f] = File{core.DigestOf([]byte(f)), int64(i)}
	}
	got, err := m.encode()
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "image.json")
	if *update {
		if err := os.WriteFile(golden, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("image.json changed, and with it the digest of every image (-want +got):\n%s", diff)
	}
	back, err := decodeManifest(got)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m, back); diff != "" {
		t.Errorf("decoded (-want +got):\n%s", diff)
	}
	for name, text := range map[string]string{
		"not json":      "{",
		"other format":  strings.Replace(string(want), `"format": 1`, `"format": 2`, 1),
		"no initrd":     strings.Replace(string(want), `"initrd.img"`, `"initrd.xz"`, 1),
		"broken digest": strings.Replace(string(want), "sha256:", "md5:", 1),
	} {
		if _, err := decodeManifest([]byte(text)); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}
