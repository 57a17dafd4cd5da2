package vmm

import "github.com/coppice-dev/coppice/core"

// WithConsole adds the last output of the guest's console to an error that callers see.
func WithConsole(err error, m Machine) error {
	console := m.Console()
	if len(console) > 512 {
		console = console[len(console)-512:]
	}
	if console == "" {
		return err
	}
	return core.Wrapf(err, core.CategoryOf(err), core.CodeOf(err), "%s; its console ends with: %s", core.MessageOf(err), console)
}
