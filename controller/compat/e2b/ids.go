package e2b

import (
	"net/netip"
	"regexp"
	"strings"

	"github.com/coppice-dev/coppice/internal/sandboxhost"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	workspacePrefix  = "ws_"
	checkpointPrefix = "ckpt_"

	// envdPort is where E2B's clients expect the daemon of a sandbox.
	envdPort = 49983
)

var bareID = regexp.MustCompile(`^[0-9a-hjkmnp-tv-z]{26}$`)

// workspaceID is the workspace of a sandbox id; ok is false for a text that cannot be one.
func workspaceID(sandbox string) (id coppice.WorkspaceID, ok bool) {
	return workspacePrefix + sandbox, bareID.MatchString(sandbox)
}

func sandboxID(id coppice.WorkspaceID) string { return strings.TrimPrefix(id, workspacePrefix) }

// checkpointID is the checkpoint of a snapshot id. E2B's clients may add a tag.
func checkpointID(snapshot string) (id coppice.CheckpointID, ok bool) {
	bare, tag, tagged := strings.Cut(snapshot, ":")
	if tagged && tag != defaultTag {
		return "", false
	}
	return checkpointPrefix + bare, bareID.MatchString(bare)
}

func snapshotID(id coppice.CheckpointID) string { return strings.TrimPrefix(id, checkpointPrefix) }

// target is a port of a sandbox.
type target = sandboxhost.Target

// hostAllowed refuses host names that a web page may have bound to this address (DNS rebinding). It
// accepts addresses, localhost, the domain, and names below these two.
func hostAllowed(host, domain string) bool {
	name := sandboxhost.Name(host)
	if _, err := netip.ParseAddr(name); err == nil || name == "localhost" {
		return true
	}
	if strings.HasSuffix(name, ".localhost") {
		return true
	}
	return domain != "" && (name == domain || strings.HasSuffix(name, "."+domain))
}
