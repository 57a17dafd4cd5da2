package guest_test

import (
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/guestagent/boot"
)

// TestVMBoot: what PID 1 says when there is no agent to say it.
func TestVMBoot(t *testing.T) {
	for name, tc := range map[string]struct{ cmdline, want string }{
		"a wrong root":         {"coppice.rootfstype=ext4", "coppice: the guest cannot start: the root file system on /dev/vda: mount ext4"},
		"the last option wins": {"coppice.probe=0 coppice.probe=1", boot.ProbeOK},
	} {
		t.Run(name, func(t *testing.T) {
			begin := time.Now()
			v := startVM(t, vmOptions{cmdline: tc.cmdline})
			select {
			case <-v.done:
			case <-time.After(90 * time.Second):
				t.Fatal("the machine has not powered itself off")
			}
			t.Logf("powered off after %s", time.Since(begin))
			if got := v.console(); !strings.Contains(got, tc.want) {
				t.Errorf("the console says %q, want %q", got, tc.want)
			}
		})
	}
}
