package build

import (
	"bufio"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// Paths inside the initrd: the contract with the guest agent.
const (
	initrdInit    = "/init"
	initrdModules = "/etc/coppice/modules" // one absolute path per line, in insmod order
	initrdLib     = "/lib/modules"
)

// checkAgent makes sure that the guest's kernel can run the agent as its first program: a static ELF executable for
// the architecture.
func checkAgent(file, arch string) error {
	refuse := func(format string, a ...any) error {
		e := core.Errorf(core.Invalid, core.CodeInvalidField, format, a...)
		e.Msg = "the guest agent " + file + " " + e.Msg + "; cure: CGO_ENABLED=0 go build ./cmd/coppice-guest"
		return e
	}
	f, err := elf.Open(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return refuse("does not exist")
	case err != nil:
		return refuse("is not an ELF executable (%v)", err)
	}
	defer f.Close()
	machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	if want, ok := machines[arch]; ok && f.Machine != want {
		return refuse("is built for %v and the guest is %s", f.Machine, arch)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return refuse("is dynamically linked, and there are no libraries in the initrd")
		}
	}
	return nil
}

// writeInitrd writes the initial root: the agent as /init, the kernel's modules and their order. It is not compressed:
// a guest under emulation unpacks slower than it reads (measured; see docs/IMAGES.md).
func writeInitrd(file, agent string, kernel images.KernelBundle) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	buffered := bufio.NewWriterSize(f, 1<<20)
	err = errors.Join(fillInitrd(newCPIOWriter(buffered), agent, kernel), buffered.Flush(), f.Close())
	if err != nil {
		return fmt.Errorf("write initrd: %w", err)
	}
	return nil
}

func fillInitrd(c *cpioWriter, agent string, kernel images.KernelBundle) error {
	for _, dir := range []string{"/dev", "/proc", "/sys", "/run", "/tmp", "/newroot", "/root"} {
		if err := c.Dir(dir, 0o755); err != nil {
			return err
		}
	}
	// The kernel opens /dev/console for /init before anything is mounted.
	for _, dev := range []struct {
		name         string
		perm         fs.FileMode
		major, minor uint32
	}{{"/dev/console", 0o600, 5, 1}, {"/dev/null", 0o666, 1, 3}, {"/dev/kmsg", 0o600, 1, 11}} {
		if err := c.Char(dev.name, dev.perm, dev.major, dev.minor); err != nil {
			return err
		}
	}
	init, err := os.ReadFile(agent)
	if err != nil {
		return err
	}
	if err := c.File(initrdInit, 0o755, init); err != nil {
		return err
	}
	var list strings.Builder
	for _, name := range kernel.Modules {
		data, err := os.ReadFile(kernel.Module(name))
		if err != nil {
			return err
		}
		at := path.Join(initrdLib, name)
		if err := c.File(at, 0o644, data); err != nil {
			return err
		}
		list.WriteString(at + "\n")
	}
	if err := c.File(initrdModules, 0o644, []byte(list.String())); err != nil {
		return err
	}
	return c.Close()
}
