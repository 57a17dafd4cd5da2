// Package dockerfile turns a Dockerfile into the instructions of a build. BuildKit's own packages
// parse it and expand its variables. What is not carried out is refused by its line: a build never
// leaves out something silently.
package dockerfile

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/coppice-dev/coppice/controller/builds/plan"
	"github.com/coppice-dev/coppice/core"
)

// Bounds of Dockerfiles.
const (
	MaxBytes = 256 << 10

	maxInstructions = 256
	maxExpanded     = 256 << 10 // bytes of a word after the expansion of its variables
	maxValues       = 2 << 20   // bytes of all variables that are put into words, and of the words
	maxPatterned    = 4 << 10   // bytes of a word with a pattern in a variable, and of its variables
	maxSources      = 256       // of a copy; likewise names to leave out
)

// File is a Dockerfile that was parsed.
type File struct {
	From string // the image of its FROM, expanded

	text   string
	meta   map[string]string // the ARGs before FROM
	args   map[string]string // of the request
	escape rune
	upload string
}

// Parse reads a Dockerfile. args are the values of ARG that the request gives. upload has the files that it copies; it may be empty.
func Parse(text string, args map[string]string, target, upload string) (f *File, err error) {
	if len(text) > MaxBytes {
		return nil, invalid(0, "it has more than %d bytes", MaxBytes)
	}
	defer func() { // the parser is a library, and the text is a client's
		if r := recover(); r != nil {
			err = invalid(0, "it cannot be read: %s", core.Clip(fmt.Sprint(r)))
		}
	}()
	parsed, err := parser.Parse(strings.NewReader(text))
	if err != nil {
		return nil, located(err)
	}
	stages, meta, err := instructions.Parse(parsed.AST, nil)
	if err != nil {
		return nil, located(err)
	}
	f = &File{text: text, args: args, escape: parsed.EscapeToken, upload: upload, meta: builtin()}
	lex, vars := shell.NewLex(f.escape), newVariables(f.meta)
	for i := range meta {
		for _, a := range meta[i].Args {
			if value, ok := args[a.Key]; ok {
				f.meta[a.Key] = value
			} else if a.Value != nil {
				if f.meta[a.Key], err = vars.expand(lex, *a.Value); err != nil {
					return nil, invalid(lineOf(&meta[i]), "ARG %s: %s", a.Key, core.Clip(err.Error()))
				}
			}
		}
	}
	switch {
	case len(stages) == 0:
		return nil, invalid(0, "it has no FROM")
	case len(stages) > 1:
		return nil, invalid(line(stages[1].Location), "it has %d stages; a build has one, so build the first one as an image of its own and name it in FROM", len(stages))
	case target != "" && !strings.EqualFold(stages[0].Name, target):
		return nil, invalid(line(stages[0].Location), "there is no stage %q", core.Clip(target))
	}
	stage := stages[0]
	if f.From, err = vars.expand(lex, stage.BaseName); err != nil || f.From == "" {
		return nil, invalid(line(stage.Location), "FROM %s names no image", core.Clip(stage.BaseName))
	}
	if stage.Platform != "" {
		return nil, invalid(line(stage.Location), "FROM --platform is not supported: an image is for the architecture of the runners")
	}
	if n := len(stage.Commands); n > maxInstructions {
		return nil, invalid(0, "it has %d instructions; at most %d are carried out", n, maxInstructions)
	}
	// What cannot be carried out is refused now, and not in the middle of a build.
	_, err = f.Plan(plan.Config{})
	return f, err
}

// builtin are the values that ARG has without a default.
func builtin() map[string]string {
	platform := "linux/" + runtime.GOARCH
	return map[string]string{
		"TARGETPLATFORM": platform, "TARGETOS": "linux", "TARGETARCH": runtime.GOARCH, "TARGETVARIANT": "",
		"BUILDPLATFORM": platform, "BUILDOS": "linux", "BUILDARCH": runtime.GOARCH, "BUILDVARIANT": "",
	}
}

// variables are what words expand to. A few bytes of a Dockerfile can ask for many of variables, so what they get is counted while they get it.
type variables struct {
	of   []map[string]string // the first one that has a name decides
	left int                 // bytes of all words
	word int                 // bytes of this word
}

func newVariables(of ...map[string]string) *variables { return &variables{of: of, left: maxValues} }

// patterned finds ${NAME#...}, ${NAME%...} and ${NAME/...}.
var patterned = regexp.MustCompile(`(?s)\$\{([\pL\pN_]+|.)[#%/]`)

func (v *variables) expand(lex *shell.Lex, word string) (string, error) {
	v.word = min(maxExpanded, v.left)
	if n := len(patterned.FindAllStringIndex(word, 2)); n > 1 {
		return "", errors.New("a word has at most one variable with a pattern") //nolint:err113 // a message
	} else if n == 1 {
		v.word = min(maxPatterned-len(word), v.left)
	}
	before := v.word
	out, _, err := lex.ProcessWord(word, v)
	if v.word < 0 || err == nil && len(out) > min(maxExpanded, v.left) {
		err = errors.New("it has too many bytes with its variables") //nolint:err113 // a message
	}
	v.left -= before - v.word + len(out)
	return out, err
}

// Get returns a variable. After too many it returns none, and expand fails.
func (v *variables) Get(name string) (string, bool) {
	for _, m := range v.of {
		if value, ok := m[name]; ok {
			if v.word -= len(value); v.word < 0 {
				return "", true
			}
			return value, true
		}
	}
	return "", false
}

// Keys lists the variables.
func (v *variables) Keys() []string {
	all := map[string]string{}
	for _, m := range v.of {
		maps.Copy(all, m)
	}
	return slices.Collect(maps.Keys(all))
}

// walk is the state between two instructions.
type walk struct {
	*File
	lex    *shell.Lex
	config plan.Config
	args   map[string]string // that are declared so far
	vars   *variables
	shell  []string
	list   []plan.Instruction
}

// Plan expands the instructions on a base. It parses the text again, because the library expands in place.
func (f *File) Plan(base plan.Config) ([]plan.Instruction, error) {
	parsed, err := parser.Parse(strings.NewReader(f.text))
	if err != nil {
		return nil, located(err)
	}
	stages, _, err := instructions.Parse(parsed.AST, nil)
	if err != nil || len(stages) == 0 {
		return nil, located(err)
	}
	w := &walk{File: f, lex: shell.NewLex(f.escape), config: base.Clone(), args: map[string]string{}, shell: []string{"/bin/sh", "-c"}}
	// ENV comes before ARG.
	w.vars = newVariables(w.config.Env, w.args, map[string]string{"PATH": plan.DefaultPath})
	for _, c := range stages[0].Commands {
		if err := w.add(c); err != nil {
			return nil, located(err)
		}
	}
	return w.list, nil
}

func (w *walk) add(c instructions.Command) error {
	at := lineOf(c)
	expander := func(word string) (string, error) { return w.vars.expand(w.lex, word) }
	if e, ok := c.(instructions.SupportsSingleWordExpansion); ok {
		if err := e.Expand(expander); err != nil {
			return invalid(at, "%s: %s", strings.ToUpper(c.Name()), core.Clip(err.Error()))
		}
	}
	out := plan.Instruction{Text: textOf(c), Line: at}
	known, err := w.configure(c, &out, expander)
	if err == nil && !known {
		err = w.machine(c, &out)
	}
	if err == nil {
		err = plan.Config{Env: w.args}.Check()
	}
	if err == nil {
		err = w.config.Check()
	}
	if err != nil && core.CodeOf(err) == core.CodeInvalidField {
		err = invalid(at, "%s", core.MessageOf(err))
	}
	out.Config = w.config.Clone()
	w.list = append(w.list, out)
	return err
}

func unsupported(at int, what string) error { return invalid(at, "%s is not supported", what) }

// configure carries out an instruction that changes only the configuration. known says whether it is one.
func (w *walk) configure(c instructions.Command, out *plan.Instruction, expander func(string) (string, error)) (known bool, err error) {
	switch c := c.(type) {
	case *instructions.EnvCommand:
		for _, kv := range c.Env {
			if err := plan.CheckEnv(kv.Key, kv.Value); err != nil {
				return true, invalid(out.Line, "ENV: %s", core.MessageOf(err))
			}
			w.config.Env[kv.Key] = kv.Value
		}
	case *instructions.ArgCommand:
		w.declare(c)
	case *instructions.WorkdirCommand:
		w.config.Workdir = w.config.In(c.Path)
		out.Dir = w.config.Workdir
	case *instructions.UserCommand:
		w.config.User = c.User
	case *instructions.CmdCommand:
		w.config.Cmd = w.argv(c.ShellDependantCmdLine)
	case *instructions.EntrypointCommand:
		w.config.Entrypoint, w.config.Cmd = w.argv(c.ShellDependantCmdLine), nil
	case *instructions.ExposeCommand:
		if len(c.Ports) > plan.MaxItems {
			return true, invalid(out.Line, "EXPOSE has more than %d ports", plan.MaxItems)
		}
		for _, p := range c.Ports {
			p, err := expander(p)
			if err != nil || !portForm.MatchString(p) {
				return true, invalid(out.Line, "EXPOSE %s is no port", core.Clip(p))
			}
			if !slices.Contains(w.config.ExposedPorts, p) {
				w.config.ExposedPorts = append(w.config.ExposedPorts, p)
			}
		}
	case *instructions.LabelCommand:
		for _, kv := range c.Labels {
			w.config.Labels[kv.Key] = kv.Value
		}
	case *instructions.ShellCommand:
		if len(c.Shell) == 0 {
			return true, unsupported(out.Line, "SHELL without a program")
		}
		w.shell = c.Shell
	case *instructions.MaintainerCommand:
	default:
		return false, nil
	}
	return true, nil
}

// declare carries out an ARG.
func (w *walk) declare(c *instructions.ArgCommand) {
	for _, a := range c.Args {
		value, given := w.File.args[a.Key]
		known, meta := w.meta[a.Key]
		switch {
		case given:
			w.args[a.Key] = value
		case a.Value != nil:
			w.args[a.Key] = *a.Value
		case meta:
			w.args[a.Key] = known
		}
	}
}

// machine makes the command or the copy of an instruction.
func (w *walk) machine(c instructions.Command, out *plan.Instruction) (err error) {
	at := out.Line
	switch c := c.(type) {
	case *instructions.RunCommand:
		if len(c.FlagsUsed) > 0 {
			return unsupported(at, "RUN --"+c.FlagsUsed[0])
		}
		out.Command, err = w.run(at, c.ShellDependantCmdLine)
		out.Env = maps.Clone(w.args)
		maps.Copy(out.Env, w.config.Env)
	case *instructions.CopyCommand:
		switch {
		case c.From != "":
			return unsupported(at, "COPY --from")
		case c.Parents:
			return unsupported(at, "COPY --parents")
		}
		out.Copy, err = w.copy(at, "COPY", c.SourcesAndDest, c.Chown, c.Chmod, c.ExcludePatterns)
	case *instructions.AddCommand:
		for _, s := range c.SourcePaths {
			switch {
			case strings.Contains(s, "://") || strings.HasPrefix(s, "git@"):
				return unsupported(at, "ADD of a URL (use RUN with curl or git)")
			case archiveName.MatchString(s):
				return unsupported(at, "ADD of an archive (use COPY, and RUN with tar)")
			}
		}
		if c.Checksum != "" || c.Unpack != nil || c.KeepGitDir != nil {
			return unsupported(at, "ADD with --checksum, --unpack or --keep-git-dir")
		}
		out.Copy, err = w.copy(at, "ADD", c.SourcesAndDest, c.Chown, c.Chmod, c.ExcludePatterns)
	default:
		return unsupported(at, strings.ToUpper(c.Name()))
	}
	return err
}

var (
	portForm    = regexp.MustCompile(`^[0-9]{1,5}(-[0-9]{1,5})?(/(tcp|udp))?$`)
	archiveName = regexp.MustCompile(`(?i)\.(tar|tgz|tar\.(gz|bz2|xz|zst)|tbz2?|txz)$`)
	modeForm    = regexp.MustCompile(`^[0-7]{3,4}$`)
)

func (w *walk) argv(c instructions.ShellDependantCmdLine) []string {
	if !c.PrependShell {
		return c.CmdLine
	}
	return append(slices.Clone(w.shell), strings.Join(c.CmdLine, " "))
}

// run makes the command of a RUN. The contents of here documents follow the line as in a script, and the shell reads them.
func (w *walk) run(at int, c instructions.ShellDependantCmdLine) ([]string, error) {
	if len(c.CmdLine) == 0 || !c.PrependShell && c.CmdLine[0] == "" {
		return nil, invalid(at, "RUN has no command")
	}
	if !c.PrependShell || len(c.Files) == 0 {
		return w.argv(c), nil
	}
	script := strings.Join(c.CmdLine, " ")
	if only := parser.MustParseHeredoc(script); only != nil && len(c.Files) == 1 && strings.TrimSpace(script) == "<<"+strings.TrimPrefix(strings.TrimSpace(script), "<<") && !strings.Contains(strings.TrimSpace(script), " ") {
		data := c.Files[0].Data
		if c.Files[0].Chomp {
			data = parser.ChompHeredocContent(data)
		}
		if strings.HasPrefix(data, "#!") {
			return nil, invalid(at, "a here document with #! is not supported; give it to the interpreter: RUN python3 <<EOF")
		}
		return append(slices.Clone(w.shell), data), nil
	}
	for _, f := range c.Files {
		script += "\n" + f.Data + f.Name
	}
	return append(slices.Clone(w.shell), script), nil
}

func (w *walk) copy(at int, name string, c instructions.SourcesAndDest, chown, chmod string, exclude []string) (*plan.Copy, error) {
	out := &plan.Copy{Upload: w.upload, Sources: slices.Clone(c.SourcePaths), Dest: w.config.In(c.DestPath), Owner: chown, Mode: chmod, Exclude: slices.Clone(exclude)}
	out.Dir = strings.HasSuffix(c.DestPath, "/") || c.DestPath == "." || c.DestPath == "" || strings.HasSuffix(c.DestPath, "/.")
	for _, f := range c.SourceContents {
		data := f.Data
		if f.Expand {
			var err error
			if data, err = w.vars.expand(w.lex, data); err != nil {
				return nil, invalid(at, "%s: %s", name, core.Clip(err.Error()))
			}
		}
		out.Inline = append(out.Inline, plan.File{Name: path.Base(f.Path), Data: data})
	}
	if len(out.Sources) > maxSources || len(out.Exclude) > maxSources {
		return nil, invalid(at, "%s has more than %d sources or names to leave out", name, maxSources)
	}
	if chmod != "" && !modeForm.MatchString(chmod) {
		return nil, invalid(at, "%s --chmod=%s is not supported; give an octal number", name, core.Clip(chmod))
	}
	if len(out.Sources) > 0 && w.upload == "" {
		return nil, invalid(at, "%s needs a context; upload one and name it", name)
	}
	if len(out.Sources)+len(out.Inline) > 1 && !out.Dir {
		return nil, invalid(at, "%s of several sources needs a directory that ends with /", name)
	}
	return out, nil
}

// textOf is an instruction in one line.
func textOf(c instructions.Command) string {
	text := strings.ToUpper(c.Name())
	if s, ok := c.(fmt.Stringer); ok {
		text = s.String()
	}
	return Line(text)
}

// Line makes one line of a text, of bounded length.
func Line(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if r := []rune(text); len(r) > 200 {
		text = string(r[:197]) + "..."
	}
	return text
}

func lineOf(c instructions.Command) int { return line(c.Location()) }

func line(ranges []parser.Range) int {
	if len(ranges) == 0 {
		return 0
	}
	return ranges[0].Start.Line
}

func invalid(at int, format string, args ...any) error {
	where := "Dockerfile: "
	if at > 0 {
		where = "Dockerfile, line " + strconv.Itoa(at) + ": "
	}
	return core.Errorf(core.Invalid, core.CodeDockerfileInvalid, "%s%s", where, fmt.Sprintf(format, args...))
}

// located makes an error of the parser one of ours.
func located(err error) error {
	if _, ours := errors.AsType[*core.Error](err); ours {
		return err
	}
	at := 0
	if where, ok := errors.AsType[*parser.LocationError](err); ok && len(where.Locations) > 0 {
		at = line(where.Locations[0])
	}
	return invalid(at, "%s", core.Clip(err.Error()))
}
