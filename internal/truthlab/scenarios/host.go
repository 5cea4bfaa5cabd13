package scenarios

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/cserver"
	"github.com/ebpfllm/ebpfllm/internal/disturb"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
)

// The C server in its two shapes. See internal/cserver for what its paths do.
var (
	threads = lab.Server{Name: "threads", Start: startC()}
	loop    = lab.Server{Name: "loop", Serial: true, Start: startC("-loop")}
)

// data is the path of the C server's FILE; those with a number lie beside it.
const data = "data"

// startC starts the C server. Its files are made by the scenarios that read them.
func startC(flags ...string) func(context.Context, *lab.Rig) error {
	return func(ctx context.Context, r *lab.Rig) error {
		program := filepath.Join(r.Dir, "cserver")
		if err := cserver.Build(program); err != nil {
			return err
		}
		port, err := lab.FreePort()
		if err != nil {
			return err
		}
		r.Paths[data] = filepath.Join(r.Dir, data)
		p, err := r.Spawn(nil, program, append([]string{strconv.Itoa(port), r.Paths[data]}, flags...)...)
		if err != nil {
			return err
		}
		r.Addr, r.PIDs = fmt.Sprintf("127.0.0.1:%d", port), []int{p.PID()}
		return r.WaitUntilUp(ctx, p, lab.Patience)
	}
}

// host are faults of the host and of the server's own threads.
func host() []lab.Scenario {
	path := func(p string) lab.Ask { return lab.Ask{Path: p} }
	var all []lab.Scenario
	for _, server := range []lab.Server{threads, loop} {
		quick := server.Name == threads.Name
		var also []string
		besides := ""
		if server.Serial {
			also, besides = []string{"receive_queue"}, "; an event loop does not read from the one that it has just accepted either"
		}
		add := func(s lab.Scenario) {
			s.Name = "host/" + s.Name + "/" + server.Name
			s.Server = server
			all = append(all, s)
		}

		add(lab.Scenario{
			Name: "accept_queue", Stage: "accept_queue", Also: also, Quick: quick,
			What:   "the accept loop rests, so that connections wait to be accepted" + besides,
			Normal: lab.Ask{NewConn: true},
			Inject: func(ctx context.Context, r *lab.Rig, d time.Duration) error {
				end := time.Now().Add(d)
				if err := r.Ask(ctx, fmt.Sprintf("/hold?%d", d.Milliseconds())); err != nil {
					return err
				}
				time.Sleep(time.Until(end))
				return nil
			},
		})
		if server.Serial {
			add(lab.Scenario{
				Name: "receive_queue", Stage: "receive_queue", Quick: true,
				What: "the event loop computes for another request, so that bytes wait to be read",
				Inject: func(ctx context.Context, r *lab.Rig, d time.Duration) error {
					return r.Ask(ctx, fmt.Sprintf("/cpu?%d", d.Milliseconds()))
				},
			})
		}
		add(lab.Scenario{
			Name: "run_queue", Stage: "run_queue", Quick: quick,
			What:   "real-time threads take the server's CPU",
			Normal: path("/cpu?2"),
			Load:   lab.Load{Connections: 2, Rate: 60},
			Inject: func(_ context.Context, r *lab.Rig, d time.Duration) error { return disturb.PrepareBurners(r.CPU)(d) },
		})
		add(lab.Scenario{
			Name: "throttled", Stage: "throttled",
			What:   "the CPU bandwidth limit of the server's cgroup drops to 5 ms per 100 ms",
			Normal: path("/cpu?2"),
			Load:   lab.Load{Connections: 2, Rate: 80},
			Length: 90 * time.Millisecond,
			Setup:  limitCPU,
			Inject: throttle,
		})
		add(lab.Scenario{
			Name: "throttled_new_connection", Stage: "throttled",
			What:   "the same, and each request comes on a connection of its own: the thread that would accept it may not run",
			Normal: lab.Ask{Path: "/cpu?2", NewConn: true},
			Load:   lab.Load{Connections: 2, Rate: 80},
			Length: 90 * time.Millisecond,
			Setup:  limitCPU,
			Inject: throttle,
		})
		add(lab.Scenario{
			Name: "page_cache", Stage: "page_cache", Quick: quick,
			What:     "a buffered read of a file that was evicted from the page cache",
			Normal:   path("/read?2"),
			Affected: path("/read?1"),
			Load:     lab.Load{Connections: 2, Rate: 25, Every: 8},
			Setup:    files(map[int]int{1: 72 << 20, 2: 72 << 20}),
			Before:   evictFile(1),
		})
		add(lab.Scenario{
			Name: "page_fault_major", Stage: "page_fault",
			What:     "a mapped file that was evicted is touched at random",
			Normal:   path("/map?2"),
			Affected: path("/map?1"),
			Setup:    files(map[int]int{1: 2 << 20, 2: 2 << 20}),
			Before:   evictFile(1),
		})
		add(lab.Scenario{
			Name: "page_fault_minor", Stage: "page_fault",
			What:     "memory is touched for the first time",
			Affected: path("/touch?96"),
			Load:     lab.Load{Every: 24},
		})
		add(lab.Scenario{
			Name: "reclaim", Stage: "reclaim", Brings: []string{"page_fault"}, // on their way to the limit and back
			What:     "memory is touched while a file that is still to be written out fills the memory limit of the server's cgroup",
			Normal:   path("/touch?68"),
			Affected: path("/touch?68"),
			Load:     lab.Load{Connections: 1, Rate: 20, Every: 5}, // another connection would reclaim what this one is to
			Setup:    limitMemory(76 << 20),
			Before:   func(ctx context.Context, r *lab.Rig) error { return r.Ask(ctx, "/soil?67584") },
		})
		add(lab.Scenario{
			Name: "compaction", Stage: "compaction",
			What:     "the thread compacts memory, through /proc/sys/vm/compact_memory",
			Affected: path("/compact?6"),
			Load:     lab.Load{Every: 24},
		})
		if !server.Serial {
			add(lab.Scenario{
				Name: "numa", Stage: "page_fault",
				What:     "NUMA balancing makes pages fault that lie on another node",
				Affected: path("/touch?96"),
				Setup:    otherNode,
			})
		}
		add(lab.Scenario{
			Name: "block_io_direct", Stage: "block_io",
			What:     "a read past the page cache",
			Affected: path("/direct?1"),
			Load:     lab.Load{Every: 24},
			Setup:    files(map[int]int{1: 48 << 20}),
		})
		add(lab.Scenario{
			Name: "block_io_fsync", Stage: "block_io",
			What:     "an fsync after a write",
			Affected: path("/sync?49152"),
			Load:     lab.Load{Rate: 50, Every: 9},
		})
		add(lab.Scenario{
			Name: "block_io_limit", Stage: "block_io",
			What:     "a read past the page cache, with the I/O limit of the server's cgroup at 20 MB/s",
			Affected: path("/direct?1"),
			Load:     lab.Load{Rate: 150, Every: 40},
			Setup:    both(files(map[int]int{1: 5 << 20}), limitIO(20e6)),
		})
		add(lab.Scenario{
			Name: "lock", Stage: "lock", Quick: quick,
			What:     "a mutex that another thread holds",
			Affected: path("/lock?40"),
		})
		add(lab.Scenario{
			Name: "user_lock", Stage: "lock",
			What:      "a spinlock that another thread holds",
			Invisible: "a lock without a system call leaves no trace in the kernel: it looks like computing",
			Affected:  path("/spin?40"),
		})
		add(lab.Scenario{
			Name: "syscall", Stage: "syscall",
			What:     "a write to a full pipe",
			Affected: path("/write?40"),
		})
		add(lab.Scenario{
			Name: "stopped", Stage: "stopped",
			What:   "SIGSTOP, and SIGCONT later",
			Inject: stopServer,
		})
		add(lab.Scenario{
			Name: "stopped_new_connection", Stage: "stopped",
			What:   "the same, and each request comes on a connection of its own: the thread that would accept it is stopped",
			Normal: lab.Ask{NewConn: true},
			Inject: stopServer,
		})
		if server.Serial {
			add(lab.Scenario{
				Name: "shared_lock", Stage: "lock", Shared: true,
				What:     "the event loop waits for a mutex for one request, and those that wait for a timer wait with it",
				Normal:   path("/timer?60"),
				Affected: path("/lock?40"),
				Load:     lab.Load{Rate: 50, Every: 12},
				Added:    ownAccount,
			})
		}

		add(lab.Scenario{
			Name: "control_cpu", Stage: "cpu", Control: true, Quick: quick,
			What:     "the handler computes",
			Affected: path("/cpu?40"),
			Load:     lab.Load{Every: 24},
		})
		add(lab.Scenario{
			Name: "control_gc", Stage: "cpu", Control: true,
			What:     "a garbage collector in user code stops the world",
			Affected: path("/collect?40"),
			Load:     lab.Load{Every: 24},
		})
		add(lab.Scenario{
			Name: "control_batch", Stage: "wait", Control: true, Quick: quick,
			What:     "an application timer batches output for 50 ms",
			Affected: path("/batch?50"),
		})
		add(lab.Scenario{
			Name: "control_engine", Stage: "cpu", Control: true,
			What:     "the engine simply takes longer: another thread computes, the request waits for it",
			Affected: path("/engine?40"),
			Load:     lab.Load{Every: 24},
		})
		add(lab.Scenario{
			Name: "control_sleep", Stage: "wait", Control: true,
			What:     "the handler sleeps",
			Affected: path("/sleep?40"),
		})
	}
	return all
}

// otherNode tells why memory of another node cannot be had. A fault with it has not been
// written: there was no machine to try it on.
func otherNode(context.Context, *lab.Rig) error {
	nodes, err := filepath.Glob("/sys/devices/system/node/node[0-9]*")
	if err != nil {
		return err
	}
	if len(nodes) < 2 {
		return lab.Unavailable("not provokable here: the machine has one NUMA node, no page is remote, and ebpfllm.numa.remote_faults is absent, as it has to be")
	}
	return lab.Unavailable("not provoked: the machine has %d NUMA nodes, and the fault is still to be written", len(nodes))
}

// ownAccount is what the server says of the fault: the other requests take their time in
// another way.
func ownAccount(s *lab.Sample, _ time.Duration) time.Duration { return s.Fault }

// throttle lowers the limit that limitCPU has prepared for a while.
func throttle(_ context.Context, r *lab.Rig, d time.Duration) error {
	if err := os.WriteFile(r.Paths[cpuQuota], []byte(r.Paths[cpuLimited]), 0o644); err != nil {
		return err
	}
	time.Sleep(d)
	return os.WriteFile(r.Paths[cpuQuota], []byte(r.Paths[cpuFree]), 0o644)
}

// both does one after the other.
func both(first, then func(context.Context, *lab.Rig) error) func(context.Context, *lab.Rig) error {
	return func(ctx context.Context, r *lab.Rig) error {
		if err := first(ctx, r); err != nil {
			return err
		}
		return then(ctx, r)
	}
}

// files makes the C server's FILE.N of the given sizes in bytes.
func files(sizes map[int]int) func(context.Context, *lab.Rig) error {
	return func(_ context.Context, r *lab.Rig) error {
		for n, size := range sizes {
			content := make([]byte, size) // random, so that no layer below makes holes of it
			_, _ = rand.Read(content)     // never fails, see crypto/rand
			if err := os.WriteFile(numbered(r, n), content, 0o644); err != nil {
				return err
			}
			if err := disturb.Evict(numbered(r, n)); err != nil {
				return err
			}
		}
		return nil
	}
}

func numbered(r *lab.Rig, n int) string { return r.Paths[data] + "." + strconv.Itoa(n) }

func evictFile(n int) func(context.Context, *lab.Rig) error {
	return func(_ context.Context, r *lab.Rig) error { return disturb.Evict(numbered(r, n)) }
}

// Names in Rig.Paths of the file that sets the CPU bandwidth limit, and of what is
// written to it.
const cpuQuota, cpuLimited, cpuFree = "cpu quota", "cpu limited", "cpu free"

// limitCPU moves the server into a cgroup whose CPU bandwidth can be limited.
func limitCPU(_ context.Context, r *lab.Rig) error {
	group, v1, err := moveToGroup(r, "cpu")
	if err != nil {
		return err
	}
	weight, value := filepath.Join(group, "cpu.weight"), "10000"
	r.Paths[cpuQuota], r.Paths[cpuLimited], r.Paths[cpuFree] = filepath.Join(group, "cpu.max"), "5000 100000", "max 100000"
	if v1 {
		weight, value = filepath.Join(group, "cpu.shares"), "262144"
		r.Paths[cpuQuota], r.Paths[cpuLimited], r.Paths[cpuFree] = filepath.Join(group, "cpu.cfs_quota_us"), "5000", "-1"
	}
	// A group competes as one for the CPU: without this the other work of the
	// machine would get most of it.
	return os.WriteFile(weight, []byte(value), 0o644)
}

// limitMemory moves the server into a cgroup with a limit of memory, in bytes.
func limitMemory(bytes int) func(context.Context, *lab.Rig) error {
	return func(_ context.Context, r *lab.Rig) error {
		group, v1, err := moveToGroup(r, "memory")
		if err != nil {
			return err
		}
		file := "memory.max"
		if v1 {
			file = "memory.limit_in_bytes"
		}
		return os.WriteFile(filepath.Join(group, file), []byte(strconv.Itoa(bytes)), 0o644)
	}
}

// limitIO moves the server into a cgroup that reads at most so many bytes per second
// from the disk of its files.
func limitIO(rate int) func(context.Context, *lab.Rig) error {
	return func(_ context.Context, r *lab.Rig) error {
		disk, err := diskOf(r.Dir)
		if err != nil {
			return err
		}
		group, v1, err := moveToGroup(r, "blkio")
		if err != nil {
			return err
		}
		file, text := "io.max", fmt.Sprintf("%s rbps=%d", disk, rate)
		if v1 {
			file, text = "blkio.throttle.read_bps_device", fmt.Sprintf("%s %d", disk, rate)
		}
		if err := os.WriteFile(filepath.Join(group, file), []byte(text), 0o644); err != nil {
			return lab.Unavailable("the kernel refuses to limit the I/O of disk %s: %v", disk, err)
		}
		return nil
	}
}

// diskOf is the number, MAJOR:MINOR, of the whole disk that a directory lies on.
func diskOf(dir string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return "", err
	}
	number := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	device, err := filepath.EvalSymlinks("/sys/dev/block/" + number)
	if err != nil {
		return "", lab.Unavailable("%s lies on no disk (device %s): run it in a directory on one", dir, number)
	}
	if _, err := os.Stat(filepath.Join(device, "partition")); err == nil {
		device = filepath.Dir(device)
	}
	b, err := os.ReadFile(filepath.Join(device, "dev"))
	return strings.TrimSpace(string(b)), err
}

// moveToGroup makes a cgroup for a controller, by its name in version 1, and moves
// the server into it. It goes when the scenario is over.
func moveToGroup(r *lab.Rig, controller string) (group string, v1 bool, err error) {
	const root = "/sys/fs/cgroup"
	parent := filepath.Join(root, controller)
	if _, err := os.Stat(filepath.Join(parent, "cgroup.procs")); err == nil {
		v1 = true
	} else {
		name := controller
		if name == "blkio" {
			name = "io"
		}
		parent = root
		if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+"+name), 0o644); err != nil {
			return "", false, lab.Unavailable("there is no cgroup controller %s, of version 1 or 2, to use: %v", name, err)
		}
	}
	group = filepath.Join(parent, fmt.Sprintf("ebpfllm-truthlab-%d", os.Getpid()))
	if err := os.Mkdir(group, 0o755); err != nil {
		return "", v1, lab.Unavailable("no cgroup can be made: %v", err)
	}
	r.Cleanup(func() error {
		for range 500 { // until the kernel has let go of the last process
			if err = os.Remove(group); !errors.Is(err, syscall.EBUSY) {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		return err
	})
	for _, pid := range r.PIDs {
		if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644); err != nil {
			return "", v1, err
		}
	}
	return group, v1, nil
}
