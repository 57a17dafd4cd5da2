package deploytest

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// root is the top of the tree.
const root = "../../.."

var buildDir string

func TestMain(m *testing.M) {
	var err error
	if buildDir, err = os.MkdirTemp("", "coppice-deploy-"); err != nil {
		panic(err)
	}
	status := m.Run()
	_ = os.RemoveAll(buildDir) // the tests' verdict is known
	os.Exit(status)
}

// built is the coppice of this tree.
var built = sync.OnceValues(func() (string, error) {
	binary := filepath.Join(buildDir, "coppice")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", binary, "./cmd/coppice")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build coppice: %w\n%s", err, out)
	}
	return binary, nil
})

func coppice(t *testing.T) string {
	t.Helper()
	binary, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return binary
}

// start is how something in deploy/ starts coppice.
type start struct {
	where string
	args  []string
	env   map[string]string
}

// known checks that coppice has the command, its flags and every variable.
func (s start) known(t *testing.T) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), coppice(t), append(slices.Clone(s.args), "--help")...).CombinedOutput()
	if err != nil {
		t.Errorf("%s: coppice %v: %v\n%s", s.where, s.args, err, out)
		return
	}
	read := variables(t)
	for _, name := range serverFlags(t) {
		if regexp.MustCompile(`(?m)^ +--` + name + `\b`).Match(out) {
			read["COPPICE_"+strings.ToUpper(strings.ReplaceAll(name, "-", "_"))] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.env)) {
		if strings.HasPrefix(name, "COPPICE_") && !read[name] {
			t.Errorf("%s sets %s, which coppice %v does not read", s.where, name, s.args)
		}
	}
}

// The exit statuses of a command line or a configuration that coppice cannot read.
const (
	exitUsage    = 2
	exitBadInput = 65
)

// refused starts it for real, with what must differ here, and expects it to end for a reason that is not its configuration.
func (s start) refused(t *testing.T, here map[string]string, says string) {
	t.Helper()
	env := map[string]string{"PATH": os.Getenv("PATH")}
	maps.Copy(env, s.env)
	maps.Copy(env, here)
	cmd := exec.CommandContext(t.Context(), coppice(t), s.args...)
	for k, v := range env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() == exitUsage || exit.ExitCode() == exitBadInput || !strings.Contains(string(out), says) {
		t.Errorf("%s: coppice %v ended with %v, want %q:\n%s", s.where, s.args, err, says, out)
	}
}

// source parses a file of the command.
func source(t *testing.T, path string) *ast.File {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// serverFile has the list of the flags of servers.
const serverFile = "internal/cli/operator/server/controller.go"

// serverFlags are the flags of servers that have a variable of their name: the list of that name in serverFile.
func serverFlags(t *testing.T) []string {
	t.Helper()
	var list []string
	ast.Inspect(source(t, root+"/"+serverFile), func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && v.Names[0].Name == "serverFlags" {
			list = literals(v)
		}
		return true
	})
	if len(list) < 10 {
		t.Fatalf("%s has no serverFlags as this test knows it: %v", serverFile, list)
	}
	return list
}

// variables are those that the command names itself.
func variables(t *testing.T) map[string]bool {
	t.Helper()
	var files []string
	for _, dir := range []string{"/cmd/coppice", "/internal/cli"} {
		err := filepath.WalkDir(root+dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() && strings.HasSuffix(path, ".go") {
				files = append(files, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	whole, names := regexp.MustCompile(`^COPPICE_[A-Z_]*[A-Z]$`), map[string]bool{}
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		for _, s := range literals(source(t, path)) {
			if whole.MatchString(s) {
				names[s] = true
			}
		}
	}
	return names
}

func literals(n ast.Node) (list []string) {
	ast.Inspect(n, func(n ast.Node) bool {
		if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
			if s, err := strconv.Unquote(l.Value); err == nil {
				list = append(list, s)
			}
		}
		return true
	})
	return list
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// capabilities are what a runner needs of root, wherever it is confined.
var capabilities = []string{"CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "NET_ADMIN", "NET_BIND_SERVICE", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN", "SYS_CHROOT", "SYS_PTRACE"}

// unreachable is a database that nobody listens for.
const unreachable = "postgres://coppice@127.0.0.1:1/coppice?sslmode=disable"

// needsToken is what a runner says that has nothing to join with; as anyone but root it does not come so far.
func needsToken() string {
	if os.Geteuid() != 0 {
		return "needs root"
	}
	return "has not joined a cluster"
}

// goList lists what coppice and its guest agent are built of.
func goList(t *testing.T) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "./cmd/...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
