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
