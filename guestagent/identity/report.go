package identity

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

const (
	hostnameFile = "/etc/hostname"
	hostsFile    = "/etc/hosts"
)

// anyHost stands for the machine's own name in what Describe compares.
const anyHost = "this-machine"

// Describe says what a file with the machine's identity holds, in a form in which machines with different identities can be compared.
// wrote is what the last reseal wrote to it; known says that there was one. hostname is the machine's present name.
//
// A reseal edits /etc/hosts and keeps what else is in it. So its digest is that of the lines with another name in place of the machine's.
func Describe(path, content, wrote string, known bool, hostname string) guestapi.IdentityFile {
	f := guestapi.IdentityFile{Path: path, Size: int64(len(content))}
	switch {
	case path == hostsFile:
		content = EditHosts(content, hostname, anyHost)
	case known:
		f.Own = content == wrote
	default: // as the image has it
		f.Own = content == "" || path == hostnameFile && strings.TrimSpace(content) == hostname
	}
	if !f.Own {
		sum := sha256.Sum256([]byte(content))
		f.SHA256 = hex.EncodeToString(sum[:])
	}
	return f
}

// EditHosts renames the machine in /etc/hosts: it replaces the old name wherever that is a whole word, and gives the
// new name to 127.0.1.1, Debian's address for the machine's own name.
func EditHosts(hosts, old, name string) string {
	var out strings.Builder
	local := false
	for line := range strings.Lines(hosts) {
		text, comment, hasComment := strings.Cut(strings.TrimRight(line, "\n"), "#")
		fields := strings.Fields(text)
		if len(fields) == 0 {
			out.WriteString(strings.TrimRight(line, "\n") + "\n")
			continue
		}
		if fields[0] == "127.0.1.1" {
			continue // written again below
		}
		local = local || fields[0] == "127.0.0.1"
		for i, f := range fields[1:] {
			if f == old && old != "localhost" {
				fields[i+1] = name
			}
		}
		out.WriteString(strings.Join(fields, "\t"))
		if hasComment {
			out.WriteString(" #" + comment)
		}
		out.WriteString("\n")
	}
	if !local {
		out.WriteString("127.0.0.1\tlocalhost\n")
	}
	return out.String() + "127.0.1.1\t" + name + "\n"
}
