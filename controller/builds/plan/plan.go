// Package plan has the values of builds: configurations of images, and instructions with everything
// expanded, so that they can be carried out. It does nothing itself.
package plan

import (
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// DefaultPath is PATH where neither the image nor a request sets it, as the agent has it.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Bounds of a configuration. Each instruction of a build has one.
const (
	MaxItems = 1000 // variables, labels and ports, each

	maxBytes = 256 << 10 // of the variables, and of the labels
)

// Config is what an image says about programs in it.
type Config struct {
	Env          map[string]string `json:"env,omitempty"`
	Workdir      string            `json:"workdir,omitempty"`
	User         string            `json:"user,omitempty"`
	Entrypoint   []string          `json:"entrypoint,omitempty"`
	Cmd          []string          `json:"cmd,omitempty"`
	ExposedPorts []string          `json:"exposed_ports,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"`
}

// Clone returns a copy that can be changed.
func (c Config) Clone() Config {
	c.Env, c.Labels = maps.Clone(c.Env), maps.Clone(c.Labels)
	c.Entrypoint, c.Cmd, c.ExposedPorts = slices.Clone(c.Entrypoint), slices.Clone(c.Cmd), slices.Clone(c.ExposedPorts)
	if c.Env == nil {
		c.Env = map[string]string{}
	}
	if c.Labels == nil {
		c.Labels = map[string]string{}
	}
	return c
}

// Check refuses a configuration that is too large.
func (c Config) Check() error {
	if len(c.Env) > MaxItems || len(c.Labels) > MaxItems || len(c.ExposedPorts) > MaxItems {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "an image has at most %d variables, labels and ports each", MaxItems)
	}
	for _, m := range []map[string]string{c.Env, c.Labels} {
		n := 0
		for name, value := range m {
			n += len(name) + len(value)
		}
		if n > maxBytes {
			return core.Errorf(core.Invalid, core.CodeInvalidField, "the variables and the labels of an image have at most %d KiB each", maxBytes>>10)
		}
	}
	return nil
}

// In makes a path of an instruction absolute.
func (c Config) In(p string) string {
	if path.IsAbs(p) {
		return path.Clean(p)
	}
	return path.Join("/", c.Workdir, p)
}

// CheckEnv refuses a variable that the file of defaults cannot hold.
func CheckEnv(name, value string) error {
	if name == "" || strings.ContainsAny(name, "=\x00\n") {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not the name of an environment variable", core.Clip(name))
	}
	if strings.ContainsAny(value, "\x00\n\r") {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the variable %s: a value is one line", core.Clip(name))
	}
	return nil
}

// Instruction is one instruction of a build. It has a command, or a copy, or neither: then it changed only the configuration.
type Instruction struct {
	Text string // as it was written, in one line
	Line int    // in the Dockerfile; 0: it is not from one

	Command []string
	Env     map[string]string // of the command
	Copy    *Copy
	Dir     string // a directory that WORKDIR makes

	Config Config // after it; a command runs in it
}

// Copy copies files of an upload, or files of the instruction itself.
type Copy struct {
	Upload  string   `json:"upload,omitempty"`
	Data    string   `json:"data,omitempty"`    // what the upload had when it was looked at
	Sources []string `json:"sources,omitempty"` // patterns
	Inline  []File   `json:"inline,omitempty"`
	Dest    string   `json:"dest"`              // absolute
	Dir     bool     `json:"dir,omitempty"`     // Dest is a directory
	Owner   string   `json:"owner,omitempty"`   // user[:group], names or numbers; empty: root
	Mode    string   `json:"mode,omitempty"`    // octal; empty: as the files have it
	Exclude []string `json:"exclude,omitempty"` // patterns of names to leave out
}

// File is a file of an instruction.
type File struct {
	Name string `json:"name"`
	Data string `json:"data"`
}
