//go:build linux && amd64

// Command receiverload measures what the receiver itself uses: its processor time
// and memory at a fixed rate of requests, and with -soak whether its memory stays
// what it is under a mixed load.
//
// The receiver runs as in the Collector, made by its factory, in a process in
// which nothing else runs but a consumer that counts; the server that is watched
// and the client that asks it are processes of their own, on real sockets. So the
// processor time is what reading, assembling and recording cost, without exporters.
// What the programs in the kernel cost is charged to the server, and measured by
// servercost.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// roleEnv says what a child process of this program is.
const roleEnv = "EBPFLLM_RECEIVERLOAD_ROLE"

func main() {
	switch role, arg, _ := strings.Cut(os.Getenv(roleEnv), "="); role {
	case "server":
		fail(serve())
		return
	case "client":
		fail(runClient(arg))
		return
	case "measure":
		fail(runMeasure(arg))
		return
	}
	rates := flag.String("rates", "1000,5000", "requests per second, one measurement each")
	length := flag.Duration("length", 20*time.Second, "of each measurement, after the warm-up")
	soak := flag.Duration("soak", 0, "instead, keep up a mixed load for so long and tell whether memory stays flat")
	rate := flag.Float64("soak-rate", 300, "requests per second of the soak")
	out := flag.String("out", "", "write the results to this file as JSON")
	profile := flag.String("profile", "", "write a processor profile of each measurement, or of a soak the heap at its end, to this directory")
	flag.Parse()
	if flag.NArg() > 0 {
		fail(fmt.Errorf("unexpected argument %q", flag.Arg(0)))
	}
	if os.Geteuid() != 0 {
		fail(errors.New("must run as root: loads programs into the kernel"))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *soak > 0 {
		fail(runSoak(ctx, *soak, *rate, *out, *profile))
		return
	}
	fail(runRates(ctx, *rates, *length, *out, *profile))
}

// plan is one measurement, and what its process is told.
type plan struct {
	Name    string        `json:"name"`
	Rate    float64       `json:"rate"` // requests per second
	Chunks  int           `json:"chunks"`
	Length  time.Duration `json:"length"`
	Profile string        `json:"profile"`
}

// report is what -out holds.
type report struct {
	Time    time.Time `json:"time"`
	Machine machine   `json:"machine"`
	Loads   []result  `json:"loads"`
}

type machine struct {
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	Go     string `json:"go"`
}

func thisMachine() machine {
	m := machine{CPUs: runtime.NumCPU(), Go: runtime.Version()}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(b))
	}
	return m
}

// warmUp precedes each measurement.
const warmUp = 5 * time.Second

// runRates measures each rate in a fresh process, and a stream of chunks beside
// them. It fails if a record was lost or a request is missing.
func runRates(ctx context.Context, rates string, length time.Duration, out, profile string) error {
	var plans []plan
	for r := range strings.SplitSeq(rates, ",") {
		rate, err := strconv.ParseFloat(r, 64)
		if err != nil || rate <= 0 || rate > 1e6 {
			return fmt.Errorf("-rates: %q is no rate", r)
		}
		plans = append(plans, plan{Name: fmt.Sprintf("%g requests/s", rate), Rate: rate, Length: length})
	}
	plans = append(plans, plan{Name: "100 streams/s of 50 chunks", Rate: 100, Chunks: 50, Length: length})
	rep := report{Time: time.Now().UTC().Truncate(time.Second), Machine: thisMachine()}
	var errs []error
	for i, p := range plans {
		if profile != "" {
			p.Profile = filepath.Join(profile, fmt.Sprintf("receiver-%d.pprof", i))
		}
		var r result
		if err := child(ctx, "measure", p, &r); err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
		rep.Loads = append(rep.Loads, r)
		errs = append(errs, r.check())
	}
	printLoads(os.Stdout, &rep)
	if out != "" {
		errs = append(errs, writeJSON(out, &rep))
	}
	return errors.Join(errs...)
}

// child runs this program in a role and reads the JSON that it prints.
func child(ctx context.Context, role string, told, answer any) error {
	b, err := json.Marshal(told)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+role+"="+string(b))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	printed, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("the %s failed: %w", role, err)
	}
	if err := json.Unmarshal(printed, answer); err != nil {
		return fmt.Errorf("the %s printed no result: %w", role, err)
	}
	return nil
}

func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "receiverload:", err)
		os.Exit(1)
	}
}
