package arrakis

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/coppice-dev/coppice/controller/compat/shared"
)

const lastPort = 65535

// ParsePorts reads an operator's list of ports: 5901=gui,5736-5740=code,8000.
func ParsePorts(list string) (out []Port, err error) {
	if list == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		span, description, _ := strings.Cut(strings.TrimSpace(part), "=")
		from, to, ranged := strings.Cut(span, "-")
		if !ranged {
			to = from
		}
		first, err1 := strconv.ParseUint(from, 10, 16)
		last, err2 := strconv.ParseUint(to, 10, 16)
		if err1 != nil || err2 != nil || first < 1 || first > last {
			return nil, fmt.Errorf("%q is no port of a VM; write 5901=gui, 5736-5740=code or 8000, with ports from 1 to %d", shared.Clip(part), lastPort)
		}
		for port := int(first); port <= int(last); port++ {
			if len(out) == maxPorts {
				return nil, fmt.Errorf("there are more than %d ports", maxPorts)
			}
			for _, p := range out {
				if p.Guest == port {
					return nil, fmt.Errorf("port %d is named twice", port)
				}
			}
			out = append(out, Port{Guest: port, Description: description})
		}
	}
	return out, nil
}
