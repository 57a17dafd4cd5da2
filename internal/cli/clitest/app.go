package clitest

import (
	"bytes"
	"strings"

	"github.com/coppice-dev/coppice/internal/cli"
)

// App is an app with its own streams and environment.
func App(env map[string]string) (a *cli.App, stdout, stderr *bytes.Buffer) {
	stdout, stderr = new(bytes.Buffer), new(bytes.Buffer)
	return &cli.App{Stdin: strings.NewReader(""), Stdout: stdout, Stderr: stderr, Getenv: func(k string) string { return env[k] }}, stdout, stderr
}
