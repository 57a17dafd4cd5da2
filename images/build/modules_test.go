package build

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/test/require"
)

// writeIndex writes the files of a kernel's module index.
func writeIndex(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestModuleOrder(t *testing.T) {
	t.Parallel()
	const dep = `kernel/drivers/virtio/virtio.ko:
kernel/drivers/virtio/virtio_ring.ko: kernel/drivers/virtio/virtio.ko
kernel/drivers/virtio/virtio_pci.ko: kernel/drivers/virtio/virtio_ring.ko kernel/drivers/virtio/virtio.ko
kernel/drivers/char/hw_random/virtio-rng.ko.xz: kernel/drivers/virtio/virtio_ring.ko kernel/drivers/virtio/virtio.ko
kernel/lib/libcrc32c.ko:
kernel/crypto/crc32c-intel.ko:
kernel/fs/erofs/erofs.ko: kernel/lib/libcrc32c.ko
kernel/a.ko: kernel/b.ko
kernel/b.ko: kernel/a.ko
kernel/lost.ko: kernel/nowhere.ko
kernel/soft-a.ko:
kernel/soft-b.ko:
`
	dir := writeIndex(t, map[string]string{
		"modules.dep": dep,
		"modules.softdep": `# Soft dependencies
softdep libcrc32c pre: crc32c
softdep erofs post: virtio
softdep soft_a pre: soft_b nothing-of-that-name
softdep soft_b pre: soft_a
`,
		"modules.alias":           "alias crc32c crc32c_intel\nalias pci:v*d* virtio_pci\nalias virtio-pci-alias virtio_pci\n",
		"modules.builtin":         "kernel/fs/ext4/ext4.ko\nkernel/net/packet/af_packet.ko\n",
		"modules.builtin.modinfo": "ext4.alias=ext3\x00ext4.license=GPL\x00",
	})
	set, err := readModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	const virtio = "kernel/drivers/virtio/virtio.ko"
	const ring = "kernel/drivers/virtio/virtio_ring.ko"
	for _, c := range []struct {
		name          string
		wanted        []string
		want, missing []string
		err           string
	}{
		{"nothing", nil, nil, nil, ""},
		{"dependencies come first, once", []string{"virtio_pci", "virtio_rng"}, []string{virtio, ring, "kernel/drivers/virtio/virtio_pci.ko", "kernel/drivers/char/hw_random/virtio-rng.ko.xz"}, nil, ""},
		{"a hyphen is an underscore", []string{"virtio-pci"}, []string{virtio, ring, "kernel/drivers/virtio/virtio_pci.ko"}, nil, ""},
		{"a soft dependency through an alias", []string{"erofs"}, []string{"kernel/crypto/crc32c-intel.ko", "kernel/lib/libcrc32c.ko", "kernel/fs/erofs/erofs.ko"}, nil, ""},
		{"built-in ones are left out", []string{"ext4", "af_packet", "ext3"}, nil, nil, ""},
		{"unknown ones are named", []string{"virtio", "zfs"}, []string{virtio}, []string{"zfs"}, ""},
		{"a circle of soft dependencies ends", []string{"soft_a"}, []string{"kernel/soft-b.ko", "kernel/soft-a.ko"}, nil, ""},
		{"a circle of dependencies is an error", []string{"a"}, nil, nil, "depends on itself"},
		{"a dependency that is not there is an error", []string{"lost"}, nil, nil, "needs nowhere"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			got, missing, err := set.order(c.wanted)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("err = %v, want one with %q", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("order (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.missing, missing); diff != "" {
				t.Errorf("missing (-want +got):\n%s", diff)
			}
		})
	}
}

func TestReadModulesNeedsAnIndex(t *testing.T) {
	t.Parallel()
	if _, err := readModules(t.TempDir()); err == nil {
		t.Error("a directory without modules.dep was accepted")
	}
	if _, err := readModules(writeIndex(t, map[string]string{"modules.dep": "no colon here\n"})); err == nil {
		t.Error("a line without a colon was accepted")
	}
}

func TestReadCompressedModule(t *testing.T) {
	t.Parallel()
	require.Program(t, "xz", "xz-utils")
	dir := writeIndex(t, map[string]string{"modules.dep": "", "kernel/x.ko": "module bytes", "kernel/y.ko.bz9": ""})
	if err := run(t.Context(), tool{name: "xz", args: []string{"-k", filepath.Join(dir, "kernel", "x.ko")}}); err != nil {
		t.Fatal(err)
	}
	set, err := readModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"kernel/x.ko", "kernel/x.ko.xz"} {
		got, err := set.read(t.Context(), file)
		if err != nil || string(got) != "module bytes" {
			t.Errorf("read(%s) = %q, %v", file, got, err)
		}
	}
	if _, err := set.read(t.Context(), "kernel/y.ko.bz9"); err == nil {
		t.Error("an unknown compression was accepted")
	}
}
