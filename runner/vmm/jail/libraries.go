package jail

import (
	"bufio"
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// loaderCache is the dynamic loader's list of libraries outside its usual directories.
const loaderCache = "/etc/ld.so.cache"

// Libraries lists the loader and the shared libraries of a program and of modules that it loads, as the loader itself finds them.
// A static program has none.
func Libraries(ctx context.Context, program string, modules []string) ([]string, error) {
	loader, err := interpreter(program)
	if err != nil || loader == "" {
		return nil, err
	}
	list := []string{loader}
	for _, file := range append([]string{program}, modules...) {
		found, err := listed(ctx, loader, file)
		if err != nil {
			return nil, err
		}
		list = append(list, found...)
	}
	if _, err := os.Stat(loaderCache); err == nil {
		list = append(list, loaderCache)
	}
	return list, nil
}

// interpreter returns the program's dynamic loader, or "" for a static program.
func interpreter(program string) (string, error) {
	f, err := elf.Open(program)
	if err != nil {
		var form *elf.FormatError
		if errors.As(err, &form) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return "", fmt.Errorf("%s is not an ELF program: %w", program, err)
		}
		return "", err
	}
	defer f.Close()
	const limit = 4096
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		b, err := io.ReadAll(io.LimitReader(p.Open(), limit))
		if err != nil {
			return "", err
		}
		return string(bytes.TrimRight(b, "\x00")), nil
	}
	return "", nil
}

// listed asks the loader which libraries it would load for a file.
func listed(ctx context.Context, loader, file string) ([]string, error) {
	cmd := exec.CommandContext(ctx, loader, "--list", file) //nolint:gosec // G204: both come from our configuration
	cmd.Env = []string{"LC_ALL=C"}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list the libraries of %s: %w", file, err)
	}
	var paths []string
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		line := strings.TrimSpace(lines.Text())
		if name, to, ok := strings.Cut(line, " => "); ok {
			if strings.HasPrefix(to, "not found") {
				return nil, fmt.Errorf("%s needs the library %s, which is not installed", file, name)
			}
			line = to
		}
		path, _, _ := strings.Cut(line, " (")
		if strings.HasPrefix(path, "/") { // the kernel's own library has no path
			paths = append(paths, path)
		}
	}
	return paths, nil
}
