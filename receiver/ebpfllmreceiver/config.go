package ebpfllmreceiver

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"

	"github.com/ebpfllm/ebpfllm/internal/stage"
	"github.com/ebpfllm/ebpfllm/internal/target"
)

// Config of the receiver.
type Config struct {
	// Targets are the processes to watch; a process is one if any entry matches it,
	// and its children are with it. Without the key, servers are watched that are
	// asked the path of an LLM API; an empty list is an error.
	Targets []TargetConfig `mapstructure:"targets"`

	// Stages, by name, can be turned off: they are then not measured, and what only
	// they need is not attached. All are on by default.
	Stages map[string]StageConfig `mapstructure:"stages"`

	// MinDuration is how long an occurrence of a stage must last to become a span of
	// its own. Shorter ones count in the totals only. At least 10us; default 1ms.
	MinDuration time.Duration `mapstructure:"min_duration"`

	// CollectionInterval is the time between two exports of the metrics. At least
	// 10ms; default 10s.
	CollectionInterval time.Duration `mapstructure:"collection_interval"`

	// EmitUnsampled makes spans also of requests whose traceparent says that their
	// trace is not sampled. They are measured and counted either way.
	EmitUnsampled bool `mapstructure:"emit_unsampled"`

	// RingBufferMiB is the size of the buffer between the kernel and the receiver. A
	// power of two from 1 to 1024; default 8.
	RingBufferMiB int `mapstructure:"ring_buffer_mib"`
}

// TargetConfig describes processes. What is set must all be true of a process.
type TargetConfig struct {
	Executable  string `mapstructure:"executable"`   // base name, or absolute path
	CommandLine string `mapstructure:"command_line"` // regular expression, found anywhere in the arguments
	Ports       []int  `mapstructure:"ports"`        // it listens on one of these TCP ports
	PID         int    `mapstructure:"pid"`          // in the host's PID namespace
}

// StageConfig turns a stage on or off.
type StageConfig struct {
	Enabled bool `mapstructure:"enabled"` // default true
}

var (
	_ component.Config    = (*Config)(nil)
	_ confmap.Unmarshaler = (*StageConfig)(nil)
)

// Unmarshal sets the default before it reads what is given.
func (s *StageConfig) Unmarshal(conf *confmap.Conf) error {
	s.Enabled = true
	return conf.Unmarshal(s)
}

func createDefaultConfig() component.Config {
	return &Config{
		MinDuration:        time.Millisecond,
		CollectionInterval: 10 * time.Second,
		RingBufferMiB:      8,
	}
}

const (
	maxPattern           = 4096 // bytes of a command_line expression
	leastMinDuration     = 10 * time.Microsecond
	leastCollectInterval = 10 * time.Millisecond
	plainNumbersAreNanos = "a number without a unit is nanoseconds"
)

// Validate reports every mistake at once.
func (c *Config) Validate() error {
	var errs []error
	if c.MinDuration < leastMinDuration {
		errs = append(errs, fmt.Errorf("min_duration is %v: it must be at least %v, or every wait of every request would become a span; give it with its unit, such as 1ms (%s)", c.MinDuration, leastMinDuration, plainNumbersAreNanos))
	}
	if c.CollectionInterval < leastCollectInterval {
		errs = append(errs, fmt.Errorf("collection_interval is %v: it must be at least %v; give it with its unit, such as 10s (%s)", c.CollectionInterval, leastCollectInterval, plainNumbersAreNanos))
	}
	if n := c.RingBufferMiB; n < 1 || n > 1024 || bits.OnesCount(uint(n)) != 1 {
		errs = append(errs, fmt.Errorf("ring_buffer_mib is %d: it must be a power of two from 1 to 1024", n))
	}
	errs = append(errs, c.validateStages()...)
	if c.Targets != nil && len(c.Targets) == 0 {
		errs = append(errs, errors.New("targets is empty: remove the key to watch every server of an LLM API, or name a target"))
	}
	for i, t := range c.Targets {
		for _, err := range t.validate() {
			errs = append(errs, fmt.Errorf("targets[%d]: %w", i, err))
		}
		for j := range i {
			if reflect.DeepEqual(t, c.Targets[j]) {
				errs = append(errs, fmt.Errorf("targets[%d] is the same as targets[%d]: remove one", i, j))
			}
		}
	}
	return errors.Join(errs...)
}

func (c *Config) validateStages() (errs []error) {
	valid := configurableStages()
	on := len(valid)
	for _, name := range slices.Sorted(maps.Keys(c.Stages)) {
		if !slices.Contains(valid, name) {
			errs = append(errs, fmt.Errorf("stages: there is no stage %q; the stages are %s", name, strings.Join(valid, ", ")))
			continue
		}
		if !c.Stages[name].Enabled {
			on--
		}
	}
	if on == 0 {
		errs = append(errs, errors.New("stages: all are disabled, so there is nothing to measure: leave one enabled or remove the receiver"))
	}
	return errs
}

// configurableStages names the stages that are measured; unattributed is what
// they leave over.
func configurableStages() []string {
	var names []string
	for _, s := range stage.All() {
		if s != stage.Unattributed {
			names = append(names, s.String())
		}
	}
	return names
}

func (t *TargetConfig) validate() (errs []error) {
	if t.Executable == "" && t.CommandLine == "" && len(t.Ports) == 0 && t.PID == 0 {
		errs = append(errs, errors.New("it says nothing: set executable, command_line, ports or pid, or remove it"))
	}
	if strings.Contains(t.Executable, "/") && !strings.HasPrefix(t.Executable, "/") {
		errs = append(errs, fmt.Errorf("executable %q is neither a name nor an absolute path", t.Executable))
	}
	if strings.ContainsAny(t.Executable, "*?[") {
		errs = append(errs, fmt.Errorf("executable %q is compared as it stands, not as a pattern: use command_line, which is a regular expression", t.Executable))
	}
	if len(t.CommandLine) > maxPattern {
		errs = append(errs, fmt.Errorf("command_line is longer than %d bytes", maxPattern))
	} else if _, err := regexp.Compile(t.CommandLine); err != nil {
		errs = append(errs, fmt.Errorf("command_line is not a regular expression: %w", err))
	}
	for _, p := range t.Ports {
		if p < 1 || p > 65535 {
			errs = append(errs, fmt.Errorf("port %d is not between 1 and 65535", p))
		}
	}
	if t.PID < 0 || t.PID > 1<<22 {
		errs = append(errs, fmt.Errorf("pid %d is not between 1 and %d", t.PID, 1<<22))
	}
	return errs
}

// rules turns the targets of a valid configuration into what they match.
func (c *Config) rules() []target.Rule {
	rules := make([]target.Rule, len(c.Targets))
	for i, t := range c.Targets {
		rules[i] = target.Rule{Executable: t.Executable, PID: uint32(t.PID)}
		if t.CommandLine != "" {
			rules[i].CommandLine = regexp.MustCompile(t.CommandLine)
		}
		for _, p := range t.Ports {
			rules[i].Ports = append(rules[i].Ports, uint16(p))
		}
	}
	return rules
}

// disabled lists the stages that are turned off.
func (c *Config) disabled() []stage.Stage {
	var off []stage.Stage
	for _, s := range stage.All() {
		if cfg, ok := c.Stages[s.String()]; ok && !cfg.Enabled {
			off = append(off, s)
		}
	}
	return off
}
