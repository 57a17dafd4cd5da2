package kvm

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// HostCPU names the CPU of this host, as a guest sees it that gets all its features. Device state from one such host
// can be loaded on another if the two names are equal.
func HostCPU() (string, error) {
	const path = "/proc/cpuinfo"
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("name the CPU of this host: %w", err)
	}
	cpu, err := parseCPU(string(b))
	if err != nil {
		return "", core.Wrapf(err, core.FailedPrecondition, core.CodeVMMFailed, "%s does not name the CPU of this host", path)
	}
	return cpu, nil
}

// identity are the fields of /proc/cpuinfo that name a CPU, on x86 and on Arm, in order. The revision of the microcode
// is not included: a revision that removes or adds a feature shows in the flags, and other revisions do not matter to a
// guest.
var identity = []string{
	"vendor_id", "cpu family", "model", "stepping",
	"CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision",
}

// parseCPU reads the first processor of a /proc/cpuinfo: "host:" vendor-family-model-stepping ":" the model's name ":" a digest of the
// flags, in whatever order the kernel lists them.
func parseCPU(cpuinfo string) (string, error) {
	fields := map[string]string{}
	for line := range strings.Lines(cpuinfo) {
		key, value, ok := strings.Cut(line, ":")
		if key = strings.TrimSpace(key); !ok {
			if len(fields) > 0 {
				break // the blank line after the first processor
			}
			continue
		}
		fields[key] = strings.TrimSpace(value)
	}
	list := strings.Fields(fields["flags"] + " " + fields["Features"]) // x86 has the one, Arm the other
	if len(list) == 0 {
		return "", fmt.Errorf("no flags in %q", core.Clip(cpuinfo))
	}
	slices.Sort(list)
	sum := sha256.Sum256([]byte(strings.Join(list, " ")))
	var who []string
	for _, key := range identity {
		if v := fields[key]; v != "" {
			who = append(who, v)
		}
	}
	if len(who) == 0 {
		return "", fmt.Errorf("no vendor and no model in %q", core.Clip(cpuinfo))
	}
	return fmt.Sprintf("host:%s:%s:%s", strings.Join(who, "-"), fields["model name"], hex.EncodeToString(sum[:6])), nil
}
