package scenarios

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/process"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/servers"
)

// field are public reports of delays below the application, those of the host and of
// the server, reproduced as small as they go. Reports of the network are in network.go.
func field() []lab.Scenario {
	threads := serial(servers.Engine(servers.Threads, servers.Unix))
	engine := serial(servers.Engine(servers.Loop, servers.SharedMemory))
	uvicorn := servers.Uvicorn()
	one := lab.Load{Connections: 1, Rate: 100, Every: 10}
	slow := lab.Load{Connections: 1, Rate: 30, Every: 9}
	all := []lab.Scenario{
		{
			Name: "cpu_limit_many_threads", Report: "kserve/kserve#1031", Server: threads, Stage: "throttled",
			What:     "four threads of a request use up the CPU limit, 10 ms per 100 ms, and the request waits for the next periods",
			Affected: get("/team4?6"), Load: lab.Load{Connections: 1, Rate: 40, Every: 8},
			Setup: quota(10 * time.Millisecond),
			Added: beyond(4 * 6 * time.Millisecond),
		},
		{
			Name: "cpu_limit", Report: "huggingface/text-embeddings-inference#170", Server: threads, Stage: "throttled",
			What:     "a request of 40 ms of computing, under a CPU limit of 15 ms per 100 ms",
			Affected: get("/team1?40"), Load: lab.Load{Connections: 1, Rate: 40, Every: 8},
			Setup: quota(15 * time.Millisecond),
			Added: beyond(40 * time.Millisecond),
		},
		{
			Name: "thread_pool_throttles_engine", Report: "sgl-project/sglang#32084", Server: threads, Stage: "throttled",
			Brings: []string{"run_queue"}, // the pool's threads have the CPU before the engine when the period is over
			What:   "threads of the API process use up the CPU limit, 25 ms per 100 ms, and the engine process cannot go on",
			Normal: get("/engine/none"), Inject: ask("/team4?12"), Load: lab.Load{Connections: 2, Rate: 25},
			Setup: quota(25 * time.Millisecond),
		},
		{
			Name: "too_many_threads", Report: "vllm-project/vllm#49013", Server: threads, Stage: "run_queue",
			What:   "a request computes on four OpenMP threads, and they have one CPU",
			Normal: get("/team1?10"), Affected: get("/team4?10"), Load: slow,
			Added: longer,
		},
		{
			Name: "too_many_engine_threads", Report: "vllm-project/vllm#9113", Server: engine, Stage: "run_queue",
			What:   "the engine computes a token on four OpenMP threads, and they have one CPU",
			Normal: get("/engine/team1?10"), Affected: get("/engine/team4?10"), Load: slow,
			Added: longer,
		},
		{
			Name: "pinned_spinners", Report: "ggml-org/llama.cpp#10397", Server: servers.LlamaCPP(2), Stage: "run_queue",
			Also:   []string{"cpu"}, // for half of the time, while it spins itself
			What:   "two threads of llama.cpp that wait for each other by spinning, and taskset leaves them one CPU",
			Normal: chat(1, 1), Load: lab.Load{Connections: 1, Rate: 20},
			Length: 100 * time.Millisecond,
			Setup: func(_ context.Context, rig *lab.Rig) error {
				return setCPUs(rig.PIDs[0], append(slices.Clone(rig.Others), rig.CPU))
			},
			Inject: func(_ context.Context, rig *lab.Rig, length time.Duration) error {
				if err := setCPUs(rig.PIDs[0], []int{rig.CPU}); err != nil {
					return err
				}
				time.Sleep(length)
				return setCPUs(rig.PIDs[0], append(slices.Clone(rig.Others), rig.CPU))
			},
		},
		{
			Name: "tokenising_in_the_loop", Report: "vllm-project/vllm#10635", Server: uvicorn, Stage: "receive_queue",
			What:   "the handler of another request tokenises a long prompt in the event loop",
			Inject: ask("/tokenise?40"),
		},
		{
			Name: "index_beyond_memory", Report: "milvus-io/milvus#28037", Server: threads, Stage: "page_fault", Also: []string{"reclaim"},
			What:   "a search touches other parts of a mapped index than the last, and the memory limit is half of the index",
			Normal: get("/map?100"), Affected: get("/search?600"), Load: one,
			Setup: both(evictRead, limitMemory(32<<20)),
		},
		{
			Name: "model_beyond_memory", Report: "ggml-org/llama.cpp#14154", Server: threads, Stage: "page_fault", Also: []string{"reclaim"},
			What:     "a mapped model is read from beginning to end, and the memory limit makes it evict itself",
			Affected: get("/scan?64"), Load: lab.Load{Connections: 1, Rate: 40, Every: 8},
			Setup: both(evictRead, limitMemory(48<<20)),
		},
		{
			Name: "swapped_out", Report: "Osmantic/ODS#2260", Server: threads, Stage: "page_fault", Also: []string{"reclaim"},
			What:     "what the request touches has been swapped out, as nothing locks it",
			Affected: get("/anon?48"), Load: one,
			Setup: both(addSwap, limitMemory(32<<20)),
		},
		{
			Name: "random_faults", Report: "sgl-project/sglang#37806", Server: engine, Stage: "page_fault",
			What:   "the engine touches its evicted weights without readahead (MADV_RANDOM), a page at a time",
			Normal: get("/engine/map?600"), Affected: get("/engine/map?600"), Load: one,
			Before: evictWeights,
		},
		{
			Name: "batch_timer", Report: "ray-project/ray#59681", Server: notSerial(uvicorn), Stage: "wait", Control: true,
			What:   "a timer of 50 ms holds back a part of the answer",
			Normal: get("/batched?0"), Affected: get("/batched?50"),
		},
		{
			Name: "detokenizer", Report: "sgl-project/sglang#23393", Server: servers.AsyncioEngine(), Stage: "cpu", Control: true,
			What:   "the one process behind the API computes long for a token",
			Normal: get("/engine/none"), Affected: get("/engine/tokenise?40"), Load: pythonEngineLoad,
		},
	}
	for i := range all {
		all[i].Name = "field/" + all[i].Name
		if all[i].Inject != nil {
			all[i].Added = longer // the server knows nothing of it
		}
	}
	return all
}

// serial is a server on which requests beside an affected one are held up with it:
// the CPU, its limit or the engine is all of theirs.
func serial(server lab.Server) lab.Server {
	server.Serial = true
	return server
}

// beyond is how much longer the client waited than usual and than the request
// computes.
func beyond(computing time.Duration) func(*lab.Sample, time.Duration) time.Duration {
	return func(s *lab.Sample, usual time.Duration) time.Duration { return longer(s, usual) - computing }
}

// quota limits the CPU time of the server for each 100 ms.
func quota(d time.Duration) func(context.Context, *lab.Rig) error {
	return func(ctx context.Context, rig *lab.Rig) error {
		if err := limitCPU(ctx, rig); err != nil {
			return err
		}
		value := strconv.FormatInt(d.Microseconds(), 10)
		if filepath.Base(rig.Paths[cpuQuota]) == "cpu.max" { // version 2
			value += " 100000"
		}
		return os.WriteFile(rig.Paths[cpuQuota], []byte(value), 0o644)
	}
}

// setCPUs moves all threads of a process to CPUs.
func setCPUs(pid int, cpus []int) error {
	var set unix.CPUSet
	for _, cpu := range cpus {
		set.Set(cpu)
	}
	return process.EachThread(pid, func(tid int) error { return unix.SchedSetaffinity(tid, &set) })
}

// addSwap adds a swap device in memory, which is as fast as they get.
func addSwap(ctx context.Context, rig *lab.Rig) error {
	const device, reset = "/dev/zram0", "/sys/block/zram0/reset"
	if err := os.WriteFile("/sys/block/zram0/disksize", []byte("256M"), 0o644); err != nil {
		return lab.Unavailable("needs a free zram device to swap to: modprobe zram (%v)", err)
	}
	rig.Cleanup(func() error { return os.WriteFile(reset, []byte("1"), 0o644) })
	for _, command := range []string{"mkswap", "swapon"} {
		if out, err := exec.CommandContext(ctx, command, device).CombinedOutput(); err != nil {
			return fmt.Errorf("%s %s: %w: %s", command, device, err, out)
		}
	}
	rig.Cleanup(func() error {
		out, err := exec.Command("swapoff", device).CombinedOutput()
		if err != nil {
			err = errors.Join(fmt.Errorf("swapoff %s: %s", device, out), err)
		}
		return err
	})
	return nil
}
