package vmm

import (
	"fmt"
	"strings"
)

// exitLines is how many lines of each output a description of an end has.
const exitLines = 10

// panicked begins the line of a console in which a Linux kernel says why it gives up.
const panicked = "Kernel panic - not syncing: "

// Describe says how the VMM ended: in the first line its status and, if the guest's kernel gave up, the reason. Lines of the VMM's own messages
// and of the console follow: those from the kernel's reason on, or else the last ones.
func (e Exit) Describe() string {
	var b strings.Builder
	fmt.Fprintf(&b, "its VMM ended: %s", e.Status)
	console := strings.Split(strings.TrimSpace(e.Console), "\n")
	last := console[max(0, len(console)-exitLines):]
	for i, line := range console {
		if _, reason, found := strings.Cut(line, panicked); found { // the first one: a second one is a consequence
			fmt.Fprintf(&b, ", after a panic of the guest's kernel: %s", reason)
			last = console[i:min(i+exitLines, len(console))]
			break
		}
	}
	if log := strings.TrimSpace(e.Log); log != "" {
		lines := strings.Split(log, "\n")
		fmt.Fprintf(&b, "\nVMM log: %s", strings.Join(lines[max(0, len(lines)-exitLines):], "\n"))
	}
	if text := strings.Join(last, "\n"); text != "" {
		fmt.Fprintf(&b, "\nconsole: %s", text)
	}
	return b.String()
}
