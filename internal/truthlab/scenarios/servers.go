package scenarios

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/disturb"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/servers"
)

// serverShapes are the main faults on every shape of server but the plain C ones,
// among them three that nobody here wrote: llama.cpp (called from Go and from Node),
// uvicorn and Node.
func serverShapes() []lab.Scenario {
	// as many threads as on a larger machine, or one that waits for the disk holds
	// up the others
	golang, asyncio, uvicorn, node := servers.Go(4), servers.Asyncio(), servers.Uvicorn(), servers.Node()
	python := pathsOf("", "cpu", "collect", "lock", "pipe", "read", "map", "touch")
	all := slices.Concat(
		mainFaults(golang, paths{
			computes: "/cpu?40", sleeps: "/sleep?40", locks: "/flock?40", blocks: "/pipe?40",
			reads: "/read?48", maps: "/map?600", touches: "/touch?64", refuses: "/accept?40",
		}),
		mainFaults(asyncio, python),
		mainFaults(uvicorn, python),
		mainFaults(node, paths{
			computes: "/cpu?40", pauses: "/collect?40", sleeps: "/sleep?40", blocks: "/pipe?40", reads: "/read?48", touches: "/touch?64",
			holds: "/cpu?40", refuses: "/cpu?40",
		}),
		nodeFaults(node),
		llamaFaults(servers.LlamaCPP(1)),
		llamaFaults(servers.NodeLlamaCPP()),
		[]lab.Scenario{
			{
				Name: "servers/gc/go-1", Server: servers.Go(1), Stage: "wait", Also: []string{"cpu"}, Control: true, Affected: get("/gc?40"),
				What: "the runtime collects garbage, on the one thread that runs Go code",
			},
			{
				Name: "servers/receive_queue/go-1", Server: servers.Go(1), Stage: "receive_queue", Inject: crowd("/cpu?10"),
				What: "other goroutines keep the one thread that runs Go code, and bytes lie unread",
			},
			{
				Name: "servers/mutex/go", Server: golang, Stage: "lock", Affected: get("/mutex?40"),
				What:      "the handler waits for a sync.Mutex that another goroutine holds",
				Invisible: "Go parks the goroutine without a system call: the kernel sees a thread that looks for other work",
			},
			{
				Name: "servers/mutex/asyncio", Server: asyncio, Stage: "lock", Affected: get("/mutex?40"),
				What:      "the event loop waits for a threading.Lock that another thread holds",
				Invisible: "Python's lock is a semaphore: waiting for it looks like waiting for work",
			},
			{
				Name: "servers/counter/engine-threads-unix", Server: servers.Engine(servers.Threads, servers.Unix), Stage: "wait", Control: true, Affected: get("/counter?40"),
				What:      "the handler waits for another thread on a futex that counts, and stands at 2",
				Invisible: "a contended mutex is a futex of 2, and nothing else tells the two apart",
			},
			{
				Name: "servers/shared_lock/asyncio", Server: asyncio, Stage: "lock", Shared: true, Normal: get("/sleep?60"), Affected: get("/lock?40"),
				What: "the event loop waits for a file lock for one request, and those that wait for a timer wait with it",
				Load: lab.Load{Rate: 50, Every: 12}, Added: ownAccount,
			},
			{
				Name: "servers/shared_syscall/node", Server: node, Stage: "syscall", Shared: true, Normal: get("/sleep?60"), Affected: get("/pipe?40"),
				What: "the event loop writes to a full pipe for one request, and those that wait for a timer wait with it",
				Load: lab.Load{Rate: 50, Every: 12}, Added: ownAccount,
			},
			{
				Name: "servers/throttled_holder/asyncio", Server: asyncio, Stage: "throttled",
				What:   "a thread of the pool computes and holds the interpreter's lock, and the CPU limit of 5 ms per 100 ms stops it: the event loop waits for the lock",
				Length: 200 * time.Millisecond, Setup: limitCPU,
				Inject: func(ctx context.Context, rig *lab.Rig, d time.Duration) error {
					done := make(chan error, 1)
					go func() { done <- rig.Ask(ctx, fmt.Sprintf("/thread/cpu?%d", d.Milliseconds())) }()
					return errors.Join(throttle(ctx, rig, d), <-done)
				},
			},
			{
				Name: "servers/blocking_sleep/uvicorn", Server: uvicorn, Stage: "receive_queue",
				What:   "another request's handler sleeps without giving way to the loop, and bytes lie unread",
				Inject: ask("/block?40"),
			},
			{
				Name: "servers/pool_lock/uvicorn", Server: notSerial(uvicorn), Stage: "lock", Affected: get("/thread/lock?40"),
				What: "a thread of the pool waits for a file lock, and the loop for the thread",
			},
			{
				Name: "servers/pool_page_cache/asyncio", Server: asyncio, Stage: "page_cache", Normal: get("/thread/read?48"), Affected: get("/thread/read?48"),
				What: "a thread of the pool reads a file that is not in memory, and the loop waits for the thread",
				Load: lab.Load{Connections: 1, Rate: 100, Every: 10}, Before: evictRead,
			},
		},
	)
	for _, api := range []string{servers.Loop, servers.Threads} {
		for _, transport := range []string{servers.Unix, servers.SharedMemory} {
			all = append(all, engineFaults(servers.Engine(api, transport), lab.Load{})...)
		}
	}
	all = append(all, hugePages(servers.Engine(servers.Threads, servers.Unix)))
	for _, server := range []lab.Server{servers.Engine(servers.Loop, servers.Unix), servers.Engine(servers.Threads, servers.SharedMemory)} {
		all = append(all, on(serial(server), []lab.Scenario{
			{
				Name: "shared_engine_page_fault", Stage: "page_fault", Shared: true, Normal: get("/engine/pace?90"), Affected: get("/engine/map?1200"), Before: evictWeights,
				What: "the engine's weights were evicted: its thread stalls for one request, and the others in flight wait for their tokens with it",
				Load: lab.Load{Rate: 35, Every: 12}, Added: whole,
			},
			{
				Name: "shared_engine_lock", Stage: "lock", Shared: true, Normal: get("/engine/pace?60"), Affected: get("/engine/lock?40"),
				What: "the engine waits for a lock for one request, and the others in flight wait for their tokens with it",
				Load: lab.Load{Rate: 50, Every: 12}, Added: whole,
			},
		})...)
	}
	all = append(all, slices.DeleteFunc(engineFaults(servers.AsyncioEngine(), pythonEngineLoad),
		func(s lab.Scenario) bool { return strings.Contains(s.Name, "run_queue") })...) // it has no thread to do that
	for i := range all {
		if all[i].Inject != nil {
			all[i].Added = longer // the server knows nothing of it
		}
	}
	return all
}

// paths are what a server delays its request by; "" is a fault that it has not.
type paths struct {
	computes string // cpu
	pauses   string // a garbage collection
	sleeps   string // a timer
	locks    string // lock
	blocks   string // syscall
	reads    string // page_cache, if the file is cold
	maps     string // page_fault, if the weights are
	touches  string // page_fault, minor
	holds    string // receive_queue, for others
	refuses  string // accept_queue, for others
}

// pathsOf are the paths of a server with the fault names of faults.py.
func pathsOf(at, computes, pauses, locks, blocks, reads, maps, touches string) paths {
	p := func(name string, n int) string { return fmt.Sprintf("%s/%s?%d", at, name, n) }
	return paths{
		computes: p(computes, 40), pauses: p(pauses, 40), sleeps: p("sleep", 40), locks: p(locks, 40), blocks: p(blocks, 40),
		reads: p(reads, 48), maps: p(maps, 600), touches: p(touches, 64), holds: p(computes, 40), refuses: p(computes, 40),
	}
}

// mainFaults are one scenario for each fault that the server has.
func mainFaults(server lab.Server, p paths) []lab.Scenario {
	all := []lab.Scenario{
		{
			Name: "cpu", Stage: "cpu", Control: true, Affected: get(p.computes),
			What: "the handler computes",
		},
		{
			Name: "gc", Stage: "cpu", Control: true, Affected: get(p.pauses),
			What: "the runtime collects garbage",
		},
		{
			Name: "timer", Stage: "wait", Control: true, Affected: get(p.sleeps),
			What: "the handler waits for a timer",
		},
		{
			Name: "lock", Stage: "lock", Affected: get(p.locks),
			What: "the handler waits for a file lock that another holds",
		},
		{
			Name: "syscall", Stage: "syscall", Affected: get(p.blocks),
			What: "the handler writes to a full pipe",
		},
		{
			Name: "page_cache", Stage: "page_cache", Normal: get(p.reads), Affected: get(p.reads), Before: evictRead,
			What: "the handler reads a file that is not in memory",
			Load: lab.Load{Connections: 1, Rate: 100, Every: 10},
		},
		{
			Name: "page_fault", Stage: "page_fault", Normal: get(p.maps), Affected: get(p.maps), Before: evictWeights,
			What: "the handler touches a mapping that was evicted",
			Load: lab.Load{Connections: 1, Rate: 100, Every: 10},
		},
		{
			Name: "page_fault_minor", Stage: "page_fault", Affected: get(p.touches),
			What: "the handler touches much fresh memory",
		},
		{
			Name: "run_queue", Stage: "run_queue", Inject: burn,
			What: "others with higher priority take the server's CPU",
		},
		{
			Name: "run_queue_new_connection", Stage: "run_queue", Normal: lab.Ask{NewConn: true}, Inject: burn,
			What: "others with higher priority take the CPU of a server that would accept a connection",
		},
		{
			Name: "receive_queue", Stage: "receive_queue", Inject: ask(p.holds),
			What: "another request keeps the event loop busy, and bytes lie unread",
		},
		{
			Name: "accept_queue", Stage: "accept_queue", Also: alsoUnread(server), Normal: lab.Ask{NewConn: true}, Inject: ask(p.refuses),
			What: "nobody accepts the connection",
		},
		{
			Name: "send_buffer", Stage: "send_buffer", Normal: get("/big?512"), Affected: slowly("/big?512"),
			What: "the client reads slowly", Added: longer,
			Load: lab.Load{Connections: 2, Rate: 60, Every: 8, Dial: smallBuffer},
		},
	}
	has := map[string]string{
		"cpu": p.computes, "gc": p.pauses, "timer": p.sleeps, "lock": p.locks, "syscall": p.blocks, "page_cache": p.reads,
		"page_fault": p.maps, "page_fault_minor": p.touches, "receive_queue": p.holds, "accept_queue": p.refuses,
		"run_queue": "/", "run_queue_new_connection": "/", "send_buffer": "/",
	}
	all = slices.DeleteFunc(all, func(s lab.Scenario) bool { return has[s.Name] == "" })
	return on(server, all)
}

// alsoUnread is receive_queue on an event loop: it may accept a connection just
// before it is kept from reading from it.
func alsoUnread(server lab.Server) []string {
	if server.Serial {
		return []string{"receive_queue"}
	}
	return nil
}

// on gives scenarios their server and their full name.
func on(server lab.Server, all []lab.Scenario) []lab.Scenario {
	for i := range all {
		all[i].Server = server
		all[i].Name = "servers/" + all[i].Name + "/" + server.Name
	}
	return all
}

// pythonEngineLoad is what two Python processes on one CPU can do, and have time to spare.
var pythonEngineLoad = lab.Load{Rate: 100, Every: 12}

// engineFaults are those that the engine process suffers: what it does has to be
// found in the request that the API process serves.
func engineFaults(server lab.Server, load lab.Load) []lab.Scenario {
	all := []lab.Scenario{
		{
			Name: "engine_cpu", Stage: "cpu", Control: true, Affected: get("/engine/cpu?40"),
			What: "the engine computes longer",
		},
		{
			Name: "engine_sleep", Stage: "wait", Control: true, Affected: get("/engine/sleep?40"),
			What: "the engine sleeps",
		},
		{
			Name: "engine_lock", Stage: "lock", Affected: get("/engine/lock?40"),
			What: "the engine waits for a lock that another of its threads holds",
		},
		{
			Name: "engine_page_fault", Stage: "page_fault", Normal: get("/engine/map?600"), Affected: get("/engine/map?600"), Before: evictWeights,
			What: "the engine's weights were evicted",
			Load: lab.Load{Connections: 1, Rate: 100, Every: 10},
		},
		{
			Name: "engine_run_queue", Stage: "run_queue", Affected: get("/engine/steal?40"),
			What: "a thread with higher priority takes the engine's CPU",
		},
	}
	for i := range all {
		if all[i].Normal.Path == "" {
			all[i].Normal, all[i].Load = get("/engine/none"), load
		}
	}
	// the engine takes requests in turn: those beside an affected one wait with it
	server.Serial = true
	return on(server, all)
}

// nodeFaults are faults of Node that take another way than those of others.
func nodeFaults(server lab.Server) []lab.Scenario {
	var hold func(time.Duration) error
	return on(server, []lab.Scenario{
		{
			Name: "lock", Stage: "lock", Normal: get("/append?1"), Affected: get("/append?1"),
			What: "a line is written to a log that another process writes to just now, in a write that takes long",
			Setup: func(ctx context.Context, rig *lab.Rig) (err error) {
				hold, err = servers.HoldWrites(ctx, rig, rig.Paths["log"])
				return err
			},
			Before: func(_ context.Context, rig *lab.Rig) error { return hold(rig.Length) },
			Load:   lab.Load{Connections: 1, Rate: 100, Every: 10},
		},
		{
			Name: "page_fault", Stage: "page_fault", Normal: get("/code?1"), Affected: get("/code?1"),
			Brings: []string{"receive_queue"}, // the code that reads the request was evicted as well
			What:   "Node's own code was evicted from memory",
			Before: func(_ context.Context, rig *lab.Rig) error {
				return disturb.EvictMapping(rig.PIDs[0], rig.Paths["code"])
			},
			Load:  lab.Load{Connections: 1, Rate: 100, Every: 10},
			Added: longer,
		},
		{
			Name: "pool_page_cache", Stage: "page_cache", Normal: get("/async/read?48"), Affected: get("/async/read?48"), Before: evictRead,
			What: "libuv's pool reads a file that is not in memory, and the loop waits for it",
			Load: lab.Load{Connections: 1, Rate: 100, Every: 10},
		},
	})
}

// llamaFaults are on the real llama.cpp.
func llamaFaults(server lab.Server) []lab.Scenario {
	scenarios := []lab.Scenario{
		{
			Name: "cpu", Stage: "cpu", Control: true, Affected: chat(16, 1),
			What: "a longer prompt",
		},
		{
			Name: "queue", Stage: "cpu", Also: []string{"wait"}, Control: true, Affected: chat(1, 1), Before: takeTurn(chat(24, 1)),
			What: "another request has the engine's turn",
		},
		{
			Name: "page_fault", Stage: "page_fault", Affected: chat(1, 1), Before: evictWeights, Report: "Osmantic/ODS#2260",
			What: "the weights were evicted, as nothing locks them",
		},
		{
			Name: "run_queue", Stage: "run_queue", Inject: burn,
			What: "others with higher priority take the server's CPU",
		},
		{
			Name: "stopped", Stage: "stopped", Inject: stopServer,
			What: "the server is stopped by a signal",
		},
	}
	for i := range scenarios {
		scenarios[i].Normal = chat(1, 1)
		scenarios[i].Load = lab.Load{Connections: 1, Rate: 25, Every: 8}
		scenarios[i].Length = 60 * time.Millisecond
	}
	return on(server, scenarios)
}

// hugePages has the kernel move pages together while a thread waits for its memory.
func hugePages(server lab.Server) lab.Scenario {
	const least = 6 << 30 // that others must have left, in bytes
	others := disturb.NewHugePages(least)
	return on(server, []lab.Scenario{{
		Name: "compaction_huge_page", Stage: "compaction", Brings: []string{"reclaim", "page_fault"}, Affected: get("/huge?32"),
		What: "huge pages are touched for the first time, and all memory that is free is in pieces",
		Load: lab.Load{Connections: 1, Rate: 25, Every: 5},
		Setup: func(_ context.Context, rig *lab.Rig) error {
			rig.Cleanup(others.Close)
			if err := others.Fill(); err != nil {
				return lab.Unavailable("the free huge pages of this machine cannot be taken: %v", err)
			}
			return nil
		},
		Before: func(context.Context, *lab.Rig) error { return others.Fill() },
	}})[0]
}

// get asks for a path.
func get(path string) lab.Ask { return lab.Ask{Path: path} }

// chat asks for a completion: so many words, which are a token each, and tokens.
func chat(words, tokens int) lab.Ask {
	body := fmt.Sprintf(`{"model":"any","stream":true,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`,
		tokens, strings.Repeat("lama ", words))
	return lab.Ask{
		Method: "POST", Path: "/v1/chat/completions", Length: int64(len(body)),
		Body: func() io.Reader { return strings.NewReader(body) },
	}
}

// slowly asks for a path and reads nothing of the answer for a while.
func slowly(path string) lab.Ask { return lab.Ask{Path: path, Read: pauseAndRead} }

func pauseAndRead(ctx context.Context, body io.Reader) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(40 * time.Millisecond):
	}
	_, err := io.Copy(io.Discard, body)
	return err
}

// smallBuffer connects with a receive buffer that holds only a small part of a
// large answer.
func smallBuffer(ctx context.Context, rig *lab.Rig) (net.Conn, error) {
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 32<<10) }); e != nil {
			return e
		}
		return err
	}}
	return d.DialContext(ctx, "tcp", rig.Addr)
}

// ask has another client ask for a path, which takes the server for the length of
// the fault.
func ask(path string) func(context.Context, *lab.Rig, time.Duration) error {
	return func(ctx context.Context, rig *lab.Rig, _ time.Duration) error { return rig.Ask(ctx, path) }
}

// crowd has several other clients ask for a path at once, who together take the
// server for the length of the fault.
func crowd(path string) func(context.Context, *lab.Rig, time.Duration) error {
	return func(ctx context.Context, rig *lab.Rig, _ time.Duration) error {
		errs := make(chan error)
		const clients = 4
		for range clients {
			go func() { errs <- rig.Ask(ctx, path) }()
		}
		var err error
		for range clients {
			err = errors.Join(err, <-errs)
		}
		return err
	}
}

// burn takes the server's CPU.
func burn(_ context.Context, rig *lab.Rig, length time.Duration) error {
	return disturb.PrepareBurners(rig.CPU)(length)
}

// stopServer stops the server for a while.
func stopServer(_ context.Context, rig *lab.Rig, length time.Duration) error {
	if err := unix.Kill(rig.PIDs[0], unix.SIGSTOP); err != nil {
		return err
	}
	time.Sleep(length)
	return unix.Kill(rig.PIDs[0], unix.SIGCONT)
}

// notSerial is a server whose affected requests do not hold up those beside them.
func notSerial(server lab.Server) lab.Server {
	server.Serial = false
	return server
}

// send makes a request like those of the load, which is in no figure.
func send(ctx context.Context, rig *lab.Rig, ask lab.Ask) error {
	req, err := http.NewRequestWithContext(ctx, ask.Method, "http://"+rig.Addr+ask.Path, ask.Body())
	if err != nil {
		return err
	}
	transport := &http.Transport{DisableKeepAlives: true}
	res, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if _, err = io.Copy(io.Discard, res.Body); err == nil && res.StatusCode != http.StatusOK {
		err = errors.New(res.Status)
	}
	return err
}

// takeTurn has another client ask, and returns when the server computes for it.
func takeTurn(ask lab.Ask) func(context.Context, *lab.Rig) error {
	failed := make(chan error, 1)
	return func(ctx context.Context, rig *lab.Rig) error {
		select {
		case err := <-failed:
			return err
		default:
		}
		before, err := cpuTime(rig.PIDs[0])
		if err != nil {
			return err
		}
		go func() {
			if err := send(context.WithoutCancel(ctx), rig, ask); err != nil {
				select {
				case failed <- err:
				default:
				}
			}
		}()
		for range 1000 {
			now, err := cpuTime(rig.PIDs[0])
			if err != nil || now-before > 5*time.Millisecond {
				return err
			}
			time.Sleep(500 * time.Microsecond)
		}
		return errors.New("the server does not compute for the request before")
	}
}

// cpuTime is how long the threads of a process have run, those that have ended left
// out.
func cpuTime(pid int) (time.Duration, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(threads) == 0 {
		return 0, errors.Join(fmt.Errorf("process %d has no threads to look at", pid), err)
	}
	var sum time.Duration
	for _, path := range threads {
		text, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			return 0, err
		}
		var ran int64
		if _, err := fmt.Sscan(string(text), &ran); err != nil {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		sum += time.Duration(ran)
	}
	return sum, nil
}

// evictRead drops the file that read faults read from memory.
func evictRead(_ context.Context, rig *lab.Rig) error { return disturb.Evict(rig.Paths["file"]) }

// evictWeights drops the weights from memory: of the engine, which is the last of
// the server's processes.
func evictWeights(_ context.Context, rig *lab.Rig) error {
	return disturb.EvictMapping(rig.PIDs[len(rig.PIDs)-1], rig.Paths["weights"])
}

// whole is what a request takes that does hardly anything but suffer its fault; the other
// requests take their time in another way.
func whole(s *lab.Sample, _ time.Duration) time.Duration { return s.Latency() }

// longer is how much longer the client waited than usual.
func longer(s *lab.Sample, usual time.Duration) time.Duration { return s.Latency() - usual }
