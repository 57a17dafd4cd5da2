package vmm

import (
	"fmt"
	"strings"
)

// A description of an end has so many of the last lines of each output, and so many bytes of the console. Of a panic it has the lines from
// shortly before on, with the trace.
const (
	exitLogLines     = 10
	exitLines        = 64
	linesBeforePanic = 16
	maxExitConsole   = 4 << 10
)

// panicked begins the line of a console in which a Linux kernel says why it gives up.
const panicked = "Kernel panic - not syncing: "

// Describe says how the VMM ended: in the first line its status and, if the guest's kernel gave up, the reason. Lines of the VMM's own messages
// and of the console follow: those around the kernel's reason, or else the last ones.
func (e Exit) Describe() string {
	var b strings.Builder
	fmt.Fprintf(&b, "its VMM ended: %s", e.Status)
	console := strings.Split(strings.TrimSpace(e.Console), "\n")
	last := console[max(0, len(console)-exitLines):]
	for i, line := range console {
		if _, reason, found := strings.Cut(line, panicked); found { // the first one: a second one is a consequence
			fmt.Fprintf(&b, ", after a panic of the guest's kernel: %s", reason)
			last = console[i:min(i+exitLines-linesBeforePanic, len(console))]
			// What the guest said before may be long. The panic comes first.
			for k, left := i-1, maxExitConsole-len(strings.Join(last, "\n")); k >= max(0, i-linesBeforePanic) && left > len(console[k]); k-- {
				left -= len(console[k]) + 1
				last = console[k:min(i+exitLines-linesBeforePanic, len(console))]
			}
			break
		}
	}
	if log := strings.TrimSpace(e.Log); log != "" {
		lines := strings.Split(log, "\n")
		fmt.Fprintf(&b, "\nVMM log: %s", strings.Join(lines[max(0, len(lines)-exitLogLines):], "\n"))
	}
	if text := strings.Join(last, "\n"); text != "" {
		if cut := len(text) - maxExitConsole; cut > 0 && strings.Contains(text, panicked) {
			text = text[:maxExitConsole]
		} else if cut > 0 {
			text = text[cut:]
		}
		fmt.Fprintf(&b, "\nconsole: %s", text)
	}
	return b.String()
}
