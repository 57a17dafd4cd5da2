package build

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// guestModules are the modules that a guest loads at boot, if the kernel has them as modules. A module that a kernel
// lacks (because it is built in under another name, or does not exist) is left out; requiredModules lists those that
// must exist.
var guestModules = []string{
	"virtio_pci", "virtio_blk", "virtio_net", "virtio_console", "virtio_rng", "vmw_vsock_virtio_transport",
	"erofs", "overlay", "ext4", "inet_diag", "tcp_diag", "udp_diag", "af_packet",
}

// requiredModules are the modules without which no guest boots; each must be a module or built in.
var requiredModules = []string{"virtio_pci", "virtio_blk", "virtio_console", "erofs", "overlay", "ext4"}

// moduleSet is the index that depmod made of one kernel's modules.
type moduleSet struct {
	dir     string              // holds modules.dep
	path    map[string]string   // module -> path below dir
	deps    map[string][]string // module -> the modules it needs, nearest first
	soft    map[string][]string // module -> names or aliases to load before it, if they exist
	aliases map[string][]string // alias without wildcards -> modules
	builtin map[string]bool     // modules and aliases that are part of the kernel
}

// readModules reads the index in dir. modules.dep is required, the rest optional.
func readModules(dir string) (*moduleSet, error) {
	s := &moduleSet{
		dir: dir, path: map[string]string{}, deps: map[string][]string{}, soft: map[string][]string{},
		aliases: map[string][]string{}, builtin: map[string]bool{},
	}
	err := eachLine(filepath.Join(dir, "modules.dep"), func(line string) error {
		file, rest, ok := strings.Cut(line, ":")
		if !ok {
			return fmt.Errorf("modules.dep: %q has no colon", core.Clip(line))
		}
		name := moduleName(file)
		s.path[name] = file
		for dep := range strings.FieldsSeq(rest) {
			s.deps[name] = append(s.deps[name], moduleName(dep))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the index of kernel modules: %w", err)
	}
	optional := map[string]func(string) error{
		"modules.builtin": func(line string) error { s.builtin[moduleName(line)] = true; return nil },
		"modules.softdep": s.addSoftdep,
		"modules.alias": func(line string) error {
			if f := strings.Fields(line); len(f) == 3 && f[0] == "alias" && !strings.ContainsAny(f[1], "*?[") {
				alias := normalModule(f[1])
				s.aliases[alias] = append(s.aliases[alias], normalModule(f[2]))
			}
			return nil
		},
	}
	for file, add := range optional {
		if err := eachLine(filepath.Join(dir, file), add); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("read the index of kernel modules: %w", err)
		}
	}
	return s, s.readBuiltinAliases()
}

// addSoftdep takes a line "softdep NAME pre: A B post: C"; only what comes before matters for an order.
func (s *moduleSet) addSoftdep(line string) error {
	f := strings.Fields(line)
	if len(f) < 3 || f[0] != "softdep" {
		return nil
	}
	pre := false
	for _, word := range f[2:] {
		switch word {
		case "pre:":
			pre = true
		case "post:":
			pre = false
		default:
			if pre {
				name := normalModule(f[1])
				s.soft[name] = append(s.soft[name], normalModule(word))
			}
		}
	}
	return nil
}

// readBuiltinAliases reads the NUL-separated "module.alias=value" records of the built-in modules.
func (s *moduleSet) readBuiltinAliases() error {
	raw, err := os.ReadFile(filepath.Join(s.dir, "modules.builtin.modinfo"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the index of kernel modules: %w", err)
	}
	for record := range bytes.SplitSeq(raw, []byte{0}) {
		if _, alias, ok := strings.Cut(string(record), ".alias="); ok {
			s.builtin[normalModule(alias)] = true
		}
	}
	return nil
}

// order returns the paths (below dir) of the wanted modules and of all modules that they need, each once, in an order
// that insmod accepts. Modules that are built in or do not exist are left out; missing lists the latter.
func (s *moduleSet) order(wanted []string) (paths, missing []string, err error) {
	done := map[string]bool{}
	busy := map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		if done[name] {
			return nil
		}
		if busy[name] {
			return fmt.Errorf("kernel module %s depends on itself", name)
		}
		busy[name] = true
		for _, soft := range s.soft[name] {
			// A soft dependency is only a wish: it is not followed if it names nothing or leads back here.
			if p, ok := s.provider(soft); ok && !busy[p] {
				if err := visit(p); err != nil {
					return err
				}
			}
		}
		for _, dep := range s.deps[name] {
			if _, ok := s.path[dep]; !ok {
				return fmt.Errorf("kernel module %s needs %s, which does not exist", name, dep)
			}
			if err := visit(dep); err != nil {
				return err
			}
		}
		busy[name] = false
		done[name] = true
		paths = append(paths, s.path[name])
		return nil
	}
	for _, w := range wanted {
		name := normalModule(w)
		switch _, ok := s.path[name]; {
		case ok:
			if err := visit(name); err != nil {
				return nil, nil, err
			}
		case !s.builtin[name]:
			missing = append(missing, name)
		}
	}
	return paths, missing, nil
}

// provider returns the module that a name or alias means; false when it is built in or unknown.
func (s *moduleSet) provider(name string) (string, bool) {
	if s.builtin[name] {
		return "", false
	}
	if _, ok := s.path[name]; ok {
		return name, true
	}
	for _, m := range s.aliases[name] {
		if _, ok := s.path[m]; ok {
			return m, true
		}
	}
	return "", false
}

// read returns a module's uncompressed bytes: the guest's loader accepts nothing else.
func (s *moduleSet) read(ctx context.Context, file string) ([]byte, error) {
	full := filepath.Join(s.dir, filepath.FromSlash(file))
	var decompress []string
	switch path.Ext(file) {
	case ".ko":
		return os.ReadFile(full)
	case ".xz":
		decompress = []string{"xz", "-dc"}
	case ".zst":
		decompress = []string{"zstd", "-dcq"}
	case ".gz":
		decompress = []string{"gzip", "-dc"}
	default:
		return nil, fmt.Errorf("kernel module %s is compressed in an unknown way", file)
	}
	text, err := output(ctx, tool{name: decompress[0], args: append(decompress[1:], full)})
	if err != nil {
		return nil, fmt.Errorf("uncompress kernel module %s: %w", file, err)
	}
	return []byte(text), nil
}

// moduleName is the name of the module in a file: "kernel/x/virtio-rng.ko.xz" is virtio_rng.
func moduleName(file string) string {
	base := path.Base(strings.TrimSpace(file))
	if i := strings.Index(base, ".ko"); i > 0 {
		base = base[:i]
	}
	return normalModule(base)
}

// normalModule applies the kernel's rule that - and _ mean the same in a module's name.
func normalModule(name string) string { return strings.ReplaceAll(name, "-", "_") }

func eachLine(file string, do func(string) error) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		if err := do(line); err != nil {
			return err
		}
	}
	return lines.Err()
}
