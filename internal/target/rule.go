// Package target finds the processes to watch and says who they are.
//
// A process is a target if a rule matches it, or if its parent is one: an API
// server, its engine and its workers are watched together. Without rules every
// process that listens on TCP is a candidate, and becomes a target once it was
// asked the path of an LLM API.
package target

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Rule describes processes. Its fields are joined by "and"; a zero field says
// nothing. A process is a target if any rule matches it.
type Rule struct {
	Executable  string         // base name of the executable, or its path if it holds a slash
	CommandLine *regexp.Regexp // found anywhere in the arguments, joined by single spaces
	Ports       []uint16       // it listens on one of these TCP ports
	PID         uint32
}

func (r *Rule) matches(p *Process, listeners []Listener) bool {
	if r.PID != 0 && r.PID != p.PID {
		return false
	}
	if r.Executable != "" {
		name := p.Executable
		if strings.Contains(r.Executable, "/") {
			name = p.Path
		}
		if name != r.Executable {
			return false
		}
	}
	if r.CommandLine != nil && !r.CommandLine.MatchString(p.CommandLine) {
		return false
	}
	if len(r.Ports) > 0 && !slices.ContainsFunc(listeners, func(l Listener) bool { return slices.Contains(r.Ports, l.Port) }) {
		return false
	}
	return true
}

// Process is a process as /proc shows it.
type Process struct {
	PID, ParentPID uint32
	StartTime      uint64 // clock ticks after boot; tells a process from an earlier one of the same pid
	Path           string // of the executable; "" for a kernel thread
	Executable     string // its base name, as UTF-8
	CommandLine    string // arguments joined by spaces, at most maxCommandLine bytes

	Identity
}

// Identity is what Proc.Identify adds: it costs more to read and is wanted of
// watched processes only.
type Identity struct {
	ServiceName string // OTEL_SERVICE_NAME, else service.name of OTEL_RESOURCE_ATTRIBUTES, else the executable's name
	Cgroup      string // its line in /proc/PID/cgroup
	ContainerID string // 64 hexadecimal digits, "" outside a container
	Go          GoRuntime
}

// Listener is a TCP port that a process listens on.
type Listener struct {
	NetNS uint32 // inode number of the network namespace
	Port  uint16
}

// setPath sets the executable as the link /proc/PID/exe shows it.
func (p *Process) setPath(link string) {
	p.Path = strings.TrimSuffix(link, " (deleted)")
	p.Executable = exportable(filepath.Base(p.Path))
}
