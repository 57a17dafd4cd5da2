package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// What is where in an emulator's directory: a QEMU with all that it links, so that it runs on any host.
const (
	emulatorProgram = "qemu-system-x86_64"
	emulatorLoader  = "ld.so"
	emulatorLibs    = "lib"
)

var emulatorData = []string{"qemu", "seabios"}

// takeEmulator copies the QEMU of a Debian tree into a new directory. The host's own may be one that must not be used: see
// emulator.accelerator.
func takeEmulator(ctx context.Context, tree, dir string) error {
	const loader, program = "lib64/ld-linux-x86-64.so.2", "usr/bin/" + emulatorProgram
	libs := filepath.Join(dir, emulatorLibs)
	if err := os.MkdirAll(libs, 0o700); err != nil {
		return err
	}
	path := filepath.Join(tree, "usr/lib/x86_64-linux-gnu") + ":" + filepath.Join(tree, "lib/x86_64-linux-gnu")
	listed, err := exec.CommandContext(ctx, filepath.Join(tree, loader), "--library-path", path, "--list", filepath.Join(tree, program)).Output() //nolint:gosec // G204: of the tree
	if err != nil {
		return fmt.Errorf("list what the machine's QEMU links: %w", err)
	}
	for line := range strings.Lines(string(listed)) {
		// "libz.so.1 => /tree/usr/lib/x86_64-linux-gnu/libz.so.1 (0x...)"; the loader and the vDSO have no arrow.
		name, rest, ok := strings.Cut(strings.TrimSpace(line), " => ")
		if !ok || strings.HasPrefix(name, "/") { // the loader again
			continue
		}
		from, _, _ := strings.Cut(rest, " ")
		if !strings.HasPrefix(from, tree+"/") {
			return fmt.Errorf("the machine's QEMU would link %s, which is not the machine's", from)
		}
		if err := copyProgram(from, filepath.Join(libs, name)); err != nil {
			return err
		}
	}
	if err := copyProgram(filepath.Join(tree, loader), filepath.Join(dir, emulatorLoader)); err != nil {
		return err
	}
	for _, d := range emulatorData {
		// What Debian keeps elsewhere is linked to.
		if out, err := exec.CommandContext(ctx, "cp", "--recursive", filepath.Join(tree, "usr/share", d), filepath.Join(dir, d)).CombinedOutput(); err != nil { //nolint:gosec // G204: of the tree
			return fmt.Errorf("copy the data of the machine's QEMU: %w: %s", err, out)
		}
	}
	return copyProgram(filepath.Join(tree, program), filepath.Join(dir, emulatorProgram))
}

// emulator is how the QEMU that emulates the machine is started.
type emulator struct {
	command []string
	version string
	major   int
	minor   int
}

var versionLine = regexp.MustCompile(`version ((\d+)\.(\d+)[.\d]*)`)

// openEmulator returns the QEMU at path, or where that is empty the one in dir.
func openEmulator(ctx context.Context, path, dir string) (emulator, error) {
	e := emulator{command: []string{path}}
	if path == "" {
		e.command = []string{
			filepath.Join(dir, emulatorLoader), "--library-path", filepath.Join(dir, emulatorLibs), filepath.Join(dir, emulatorProgram),
		}
		for _, d := range emulatorData {
			e.command = append(e.command, "-L", filepath.Join(dir, d))
		}
	}
	out, err := exec.CommandContext(ctx, e.command[0], append(e.command[1:len(e.command):len(e.command)], "--version")...).Output() //nolint:gosec // G204: the user's or ours
	if err != nil {
		return e, fmt.Errorf("ask the emulator for its version: %w", err)
	}
	return e, e.setVersion(string(out))
}

// setVersion takes what the program says of its version.
func (e *emulator) setVersion(said string) error {
	m := versionLine.FindStringSubmatch(said)
	if m == nil {
		return errors.New("the emulator does not say its version")
	}
	e.version = m[1]
	e.major, _ = strconv.Atoi(m[2]) // digits, by the expression
	e.minor, _ = strconv.Atoi(m[3])
	return nil
}

// accelerator is the argument of -accel. Before 8.1, processors that are emulated on threads of their own run code that the
// machine's kernel has just patched: sooner or later it panics at a breakpoint of its own.
func (e emulator) accelerator() string {
	if e.major < 8 || e.major == 8 && e.minor < 1 {
		return "tcg,thread=single"
	}
	return "tcg,thread=multi"
}
