package target

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"unicode/utf8"
)

// Bounds of what is read of one process, in bytes. A process chooses its own
// arguments and environment.
const (
	maxCommandLine = 4 << 10
	maxEnviron     = 1 << 20
	maxServiceName = 256
	maxSmallFile   = 64 << 10
	maxMountInfo   = 1 << 20
)

// Proc reads processes from a proc file system.
type Proc struct{ root string }

// NewProc returns a reader of the proc file system mounted at root.
func NewProc(root string) Proc { return Proc{root} }

func (p Proc) file(pid uint32, name string) string {
	return filepath.Join(p.root, strconv.FormatUint(uint64(pid), 10), name)
}

// PIDs lists the processes that exist.
func (p Proc) PIDs() ([]uint32, error) {
	dir, err := os.Open(p.root)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	pids := make([]uint32, 0, len(names))
	for _, name := range names {
		if pid, err := strconv.ParseUint(name, 10, 32); err == nil {
			pids = append(pids, uint32(pid))
		}
	}
	return pids, nil
}

// Process reads what rules look at. The error is fs.ErrNotExist if there is no
// such process, and fs.ErrPermission if its executable may not be read.
func (p Proc) Process(pid uint32) (Process, error) {
	proc := Process{PID: pid}
	var err error
	if proc.ParentPID, proc.StartTime, err = p.stat(pid); err != nil {
		return Process{}, err
	}
	link, err := os.Readlink(p.file(pid, "exe"))
	switch {
	case err == nil:
		proc.setPath(link)
	case !errors.Is(err, fs.ErrNotExist): // a kernel thread has none
		return Process{}, gone(pid, err)
	}
	args, err := readBounded(p.file(pid, "cmdline"), maxCommandLine)
	if err != nil {
		return Process{}, gone(pid, err)
	}
	args = bytes.ReplaceAll(bytes.TrimRight(args, "\x00"), []byte{0}, []byte{' '})
	proc.CommandLine = strings.ToValidUTF8(string(args), "\uFFFD")
	return proc, nil
}

func (p Proc) stat(pid uint32) (parent uint32, start uint64, err error) {
	stat, err := readBounded(p.file(pid, "stat"), maxSmallFile)
	if err != nil {
		return 0, 0, gone(pid, err)
	}
	if parent, start, err = parseStat(stat); err != nil {
		return 0, 0, fmt.Errorf("process %d: %w", pid, err)
	}
	return parent, start, nil
}

// Leaderless tells whether the first thread of a process has ended and others go
// on: the process lives then, and /proc/PID shows neither its executable nor its
// files.
func (p Proc) Leaderless(pid uint32) bool {
	threads, err := os.ReadDir(p.file(pid, "task"))
	if err != nil {
		return false
	}
	_, err = os.Readlink(p.file(pid, "exe"))
	return len(threads) > 1 && errors.Is(err, fs.ErrNotExist)
}

// ReadsAll tells whether this process has the capabilities that reading the
// processes of all users takes: CAP_SYS_PTRACE, and CAP_DAC_READ_SEARCH or
// CAP_DAC_OVERRIDE.
func (p Proc) ReadsAll() bool {
	status, err := readBounded(filepath.Join(p.root, "self", "status"), maxSmallFile)
	if err != nil {
		return false
	}
	_, rest, _ := bytes.Cut(status, []byte("\nCapEff:"))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	effective, err := strconv.ParseUint(string(bytes.TrimSpace(line)), 16, 64)
	if err != nil {
		return false
	}
	const override, readSearch, ptrace = 1 << 1, 1 << 2, 1 << 19 // linux/capability.h
	return effective&ptrace != 0 && effective&(override|readSearch) != 0
}

// Identify fills in the identity of a process that Process returned. What
// cannot be read stays empty; the executable's name then is the service's.
func (p Proc) Identify(proc *Process) {
	proc.Identity = Identity{ServiceName: proc.Executable}
	if env, err := readBounded(p.file(proc.PID, "environ"), maxEnviron); err == nil {
		if name := serviceName(env); name != "" {
			proc.ServiceName = name
		}
	}
	if groups, err := readBounded(p.file(proc.PID, "cgroup"), maxSmallFile); err == nil {
		proc.Cgroup, proc.ContainerID = cgroup(groups)
	}
	if proc.ContainerID == "" { // hidden by a cgroup namespace
		if mounts, err := readBounded(p.file(proc.PID, "mountinfo"), maxMountInfo); err == nil {
			proc.ContainerID = mountedContainer(mounts)
		}
	}
	proc.Go = goRuntime(p.file(proc.PID, "exe"))
}

// Listeners returns the TCP ports that a process listens on.
func (p Proc) Listeners(pid uint32) ([]Listener, error) {
	return p.newPorts().of(pid)
}

// ports joins the sockets that processes hold with the ports that namespaces
// listen on, reading each namespace once.
type ports struct {
	proc    Proc
	byNetNS map[uint32]map[uint64]uint16 // namespace -> socket inode -> port
	told    map[Listener]bool            // by the watcher: processes share ports
}

func (p Proc) newPorts() *ports {
	return &ports{p, map[uint32]map[uint64]uint16{}, map[Listener]bool{}}
}

func (ps *ports) of(pid uint32) ([]Listener, error) {
	link, err := os.Readlink(ps.proc.file(pid, "ns/net"))
	if err != nil {
		return nil, gone(pid, err)
	}
	inode, ok := linkInode(link, "net")
	if !ok || inode > 1<<32-1 {
		return nil, fmt.Errorf("process %d: network namespace %q not understood", pid, link)
	}
	ns := uint32(inode)
	sockets, ok := ps.byNetNS[ns]
	if !ok {
		sockets = map[uint64]uint16{}
		for _, name := range []string{"net/tcp", "net/tcp6"} {
			f, err := os.Open(ps.proc.file(pid, name))
			if errors.Is(err, fs.ErrNotExist) {
				continue // no IPv6, or the process just ended
			}
			if err != nil {
				return nil, gone(pid, err)
			}
			err = parseListening(f, sockets)
			f.Close()
			if err != nil {
				return nil, fmt.Errorf("process %d: %s: %w", pid, name, err)
			}
		}
		ps.byNetNS[ns] = sockets
	}
	if len(sockets) == 0 {
		return nil, nil
	}
	dir, err := os.Open(ps.proc.file(pid, "fd"))
	if err != nil {
		return nil, gone(pid, err)
	}
	defer dir.Close()
	var found []Listener
	seen := map[uint16]bool{}
	for {
		names, err := dir.Readdirnames(1024)
		for _, name := range names {
			link, err := os.Readlink(filepath.Join(dir.Name(), name))
			if err != nil {
				continue // closed meanwhile
			}
			inode, ok := linkInode(link, "socket")
			if !ok {
				continue
			}
			if port, ok := sockets[inode]; ok && !seen[port] {
				seen[port] = true
				found = append(found, Listener{ns, port})
			}
		}
		if err == io.EOF {
			return found, nil
		}
		if err != nil {
			return found, gone(pid, err)
		}
	}
}

// parseListening adds the listening sockets of a /proc/net/tcp table. The kernel
// lists them before all others (tcp_get_idx), of which there may be very many:
// reading ends with the first of these.
func parseListening(r io.Reader, sockets map[uint64]uint16) error {
	lines := bufio.NewScanner(r)
	lines.Scan() // heading
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 10 {
			continue
		}
		if f[3] != "0A" {
			break
		}
		_, hex, _ := strings.Cut(f[1], ":")
		port, err1 := strconv.ParseUint(hex, 16, 16)
		inode, err2 := strconv.ParseUint(f[9], 10, 64)
		if err1 != nil || err2 != nil {
			continue
		}
		sockets[inode] = uint16(port)
	}
	return lines.Err()
}

// linkInode reads the inode number of a link such as "socket:[1234]".
func linkInode(link, kind string) (uint64, bool) {
	s, ok := strings.CutPrefix(link, kind+":[")
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSuffix(s, "]"), 10, 64)
	return n, err == nil
}

// parseStat reads the parent and the start time from /proc/PID/stat. The name
// in parentheses is the process's choice and may hold any byte, so the fields
// are counted from the last parenthesis.
func parseStat(stat []byte) (parent uint32, start uint64, err error) {
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(f) < 20 {
		return 0, 0, errors.New("stat not understood")
	}
	ppid, err1 := strconv.ParseUint(string(f[1]), 10, 32)
	start, err2 := strconv.ParseUint(string(f[19]), 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		return 0, 0, fmt.Errorf("stat not understood: %w", err)
	}
	return uint32(ppid), start, nil
}

// serviceName finds the service's name in an environment as the OpenTelemetry
// SDKs would.
func serviceName(environ []byte) string {
	var fromAttributes string
	for v := range bytes.SplitSeq(environ, []byte{0}) {
		if name, ok := bytes.CutPrefix(v, []byte("OTEL_SERVICE_NAME=")); ok && len(name) > 0 {
			return exportable(string(name))
		}
		if list, ok := bytes.CutPrefix(v, []byte("OTEL_RESOURCE_ATTRIBUTES=")); ok {
			for pair := range strings.SplitSeq(string(list), ",") {
				key, value, _ := strings.Cut(pair, "=")
				if strings.TrimSpace(key) != "service.name" {
					continue
				}
				value = strings.TrimSpace(value)
				if decoded, err := url.PathUnescape(value); err == nil {
					value = decoded
				}
				fromAttributes = exportable(value)
			}
		}
	}
	return fromAttributes
}

// exportable bounds a string that a process chose and makes it valid UTF-8.
func exportable(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= maxServiceName {
		return s
	}
	cut := maxServiceName
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut]
}

var containerID = regexp.MustCompile(`(?:^|[^0-9a-f])([0-9a-f]{64})(?:[^0-9a-f]|$)`)

// cgroup returns the line that places the process: that of the unified
// hierarchy if it is used, else the first with a path below the root, else the
// first; and the container's id from any of them.
func cgroup(groups []byte) (line, container string) {
	var unified, deep, first string
	for l := range strings.Lines(string(groups)) {
		l = strings.TrimSuffix(l, "\n")
		path := l[strings.LastIndexByte(l, ':')+1:]
		if first == "" {
			first = l
		}
		if path != "/" {
			if strings.HasPrefix(l, "0::") {
				unified = l
			} else if deep == "" {
				deep = l
			}
		}
		if m := containerID.FindAllStringSubmatch(l, -1); m != nil {
			container = m[len(m)-1][1] // the innermost
		}
	}
	for _, l := range []string{unified, deep, first} {
		if l != "" {
			return strings.ToValidUTF8(l, "\uFFFD"), container
		}
	}
	return "", container
}

// mountedContainer finds the container's id in the files that engines mount
// into it (/etc/hostname and kin), whose source holds it. In Kubernetes these
// are the pod's: their source holds the id of its sandbox, which is no
// container's that anybody knows.
func mountedContainer(mounts []byte) string {
	var found string
	for l := range strings.Lines(string(mounts)) {
		f := strings.Fields(l)
		if len(f) < 5 {
			continue
		}
		switch f[4] {
		case "/etc/hostname", "/etc/hosts", "/etc/resolv.conf":
			if strings.HasSuffix(f[3], "/etc-hosts") || strings.Contains(f[3], "/sandboxes/") { // the kubelet's file; containerd's
				return ""
			}
			if m := containerID.FindStringSubmatch(f[3]); m != nil && found == "" {
				found = m[1]
			}
		}
	}
	return found
}

func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
}

// gone words an error of reading a process; one that ends while it is read
// reports ESRCH, which is the same as not being there.
func gone(pid uint32, err error) error {
	if errors.Is(err, syscall.ESRCH) {
		err = fs.ErrNotExist
	}
	return fmt.Errorf("process %d: %w", pid, err)
}
