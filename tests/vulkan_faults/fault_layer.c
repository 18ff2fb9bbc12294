/* A Vulkan layer that makes one call fail. It needs a C compiler and no headers.

   FAULT_CALL    submit, wait, status, allocate, pipeline or device: which calls are counted
   FAULT_AT      the number of the call of a device that fails, from 1 on; 0 or unset: none
   FAULT_RESULT  lost or memory

   A lost device stays lost: all its later submissions and waits fail, as Vulkan demands. The variables are read at
   every call, and a process may load this library again to read `fault_counts` and `fault_fired`. */

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* What vulkan.h and vk_layer.h declare, as far as it is needed here. */

#define EXPORT __attribute__((visibility("default")))
#define OUT_OF_DEVICE_MEMORY (-2)
#define INITIALIZATION_FAILED (-3)
#define DEVICE_LOST (-4)
#define LOADER_INSTANCE_CREATE_INFO 47
#define LOADER_DEVICE_CREATE_INFO 48

typedef int32_t Result;
typedef void *Handle; /* instance, physical device, device or queue; its first word is the loader's dispatch table */
typedef void (*Function)(void);
typedef Function (*GetProcAddr)(Handle, const char *);

typedef struct Link {
    struct Link *next;
    GetProcAddr instance_proc;
    GetProcAddr device_or_physical_proc; /* vkGetDeviceProcAddr in the chain of a device */
} Link;

typedef struct CreateInfo {
    int32_t type;
    struct CreateInfo *next;
    int32_t function; /* 0: `link` is the next layer */
    Link *link;
} CreateInfo;

typedef struct {
    int32_t type;
    void *next;
    uint32_t version;
    GetProcAddr instance_proc, device_proc, physical_proc;
} Negotiation;

/* Counting and failing */

enum { SUBMIT, WAIT, STATUS, ALLOCATE, PIPELINE, DEVICE, KINDS };
static const char *const names[KINDS] = {"submit", "wait", "status", "allocate", "pipeline", "device"};
EXPORT atomic_long fault_counts[KINDS]; /* calls of the present device */
EXPORT atomic_long fault_fired;         /* how often a call was made to fail */
static _Atomic(void *) lost_device; /* the dispatch table of the device that was lost */
static Handle current_device; /* the last one; all devices of one driver share their functions */
static GetProcAddr next_instance_proc, next_device_proc;

static void *key(Handle handle) { return *(void **)handle; }

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

static Result failure(void) { return strcmp(setting("FAULT_RESULT"), "memory") ? DEVICE_LOST : OUT_OF_DEVICE_MEMORY; }

/* The failure that this call must return, or 0. */
static Result fault(int kind, Handle handle) {
    if (kind <= STATUS && lost_device == key(handle)) return DEVICE_LOST;
    if (kind != DEVICE && key(handle) != key(current_device)) return 0; /* an older device is being released */
    long number = atomic_fetch_add(&fault_counts[kind], 1) + 1;
    if (strcmp(setting("FAULT_CALL"), names[kind]) || atol(setting("FAULT_AT")) != number) return 0;
    if (failure() == DEVICE_LOST && kind != DEVICE) lost_device = key(handle);
    fault_fired++;
    return failure();
}

/* The calls. All take a dispatchable handle first and end with a Result. */

#define INTERCEPT(KIND, NAME, TYPES, PARAMETERS, ARGUMENTS)          \
    static Result NAME PARAMETERS {                                  \
        static _Atomic(Function) next;                               \
        Result failed = fault(KIND, handle);                         \
        if (failed) return failed;                                   \
        if (!next) next = next_device_proc(current_device, #NAME);   \
        return ((Result(*) TYPES)next)ARGUMENTS;                     \
    }

INTERCEPT(SUBMIT, vkQueueSubmit, (Handle, uint32_t, const void *, uint64_t),
          (Handle handle, uint32_t count, const void *infos, uint64_t fence), (handle, count, infos, fence))
INTERCEPT(SUBMIT, vkQueueSubmit2, (Handle, uint32_t, const void *, uint64_t),
          (Handle handle, uint32_t count, const void *infos, uint64_t fence), (handle, count, infos, fence))
INTERCEPT(SUBMIT, vkQueueSubmit2KHR, (Handle, uint32_t, const void *, uint64_t),
          (Handle handle, uint32_t count, const void *infos, uint64_t fence), (handle, count, infos, fence))
INTERCEPT(WAIT, vkWaitForFences, (Handle, uint32_t, const uint64_t *, uint32_t, uint64_t),
          (Handle handle, uint32_t count, const uint64_t *fences, uint32_t all, uint64_t timeout),
          (handle, count, fences, all, timeout))
INTERCEPT(STATUS, vkGetFenceStatus, (Handle, uint64_t), (Handle handle, uint64_t fence), (handle, fence))
INTERCEPT(WAIT, vkWaitSemaphores, (Handle, const void *, uint64_t),
          (Handle handle, const void *info, uint64_t timeout), (handle, info, timeout))
INTERCEPT(WAIT, vkWaitSemaphoresKHR, (Handle, const void *, uint64_t),
          (Handle handle, const void *info, uint64_t timeout), (handle, info, timeout))
INTERCEPT(STATUS, vkGetSemaphoreCounterValue, (Handle, uint64_t, uint64_t *),
          (Handle handle, uint64_t semaphore, uint64_t *value), (handle, semaphore, value))
INTERCEPT(STATUS, vkGetSemaphoreCounterValueKHR, (Handle, uint64_t, uint64_t *),
          (Handle handle, uint64_t semaphore, uint64_t *value), (handle, semaphore, value))
INTERCEPT(WAIT, vkDeviceWaitIdle, (Handle), (Handle handle), (handle))
INTERCEPT(WAIT, vkQueueWaitIdle, (Handle), (Handle handle), (handle))
INTERCEPT(ALLOCATE, vkAllocateMemory, (Handle, const void *, const void *, uint64_t *),
          (Handle handle, const void *info, const void *allocator, uint64_t *memory),
          (handle, info, allocator, memory))
INTERCEPT(PIPELINE, vkCreateComputePipelines, (Handle, uint64_t, uint32_t, const void *, const void *, uint64_t *),
          (Handle handle, uint64_t cache, uint32_t count, const void *infos, const void *allocator,
           uint64_t *pipelines),
          (handle, cache, count, infos, allocator, pipelines))

/* The chain of layers */

static CreateInfo *find_link(void *info, int32_t type) {
    CreateInfo *found = ((CreateInfo *)info)->next;
    while (found && !(found->type == type && found->function == 0)) found = found->next;
    return found;
}

static Result vkCreateInstance(void *info, const void *allocator, Handle *instance) {
    CreateInfo *chain = find_link(info, LOADER_INSTANCE_CREATE_INFO);
    if (!chain) return INITIALIZATION_FAILED;
    GetProcAddr proc = chain->link->instance_proc;
    chain->link = chain->link->next;
    Result (*create)(void *, const void *, Handle *) = (void *)proc(NULL, "vkCreateInstance");
    Result result = create(info, allocator, instance);
    if (result == 0) next_instance_proc = proc;
    return result;
}

static Result vkCreateDevice(Handle physical, void *info, const void *allocator, Handle *device) {
    CreateInfo *chain = find_link(info, LOADER_DEVICE_CREATE_INFO);
    if (!chain) return INITIALIZATION_FAILED;
    for (int kind = 0; kind < KINDS; kind++) fault_counts[kind] = 0;
    Result failed = fault(DEVICE, physical);
    if (failed) return failed;
    GetProcAddr instance_proc = chain->link->instance_proc, device_proc = chain->link->device_or_physical_proc;
    chain->link = chain->link->next;
    Result (*create)(Handle, void *, const void *, Handle *) = (void *)instance_proc(NULL, "vkCreateDevice");
    Result result = create(physical, info, allocator, device);
    if (result) return result;
    next_device_proc = device_proc;
    current_device = *device;
    if (lost_device == key(*device)) lost_device = NULL; /* the table's memory is used again */
    return 0;
}

static Function device_proc(Handle device, const char *name);
static Function instance_proc(Handle instance, const char *name);

#define ENTRY(NAME) {#NAME, (Function)NAME}
static const struct {
    const char *name;
    Function function;
} entries[] = {
    {"vkGetInstanceProcAddr", (Function)instance_proc},
    {"vkGetDeviceProcAddr", (Function)device_proc},
    ENTRY(vkCreateInstance), ENTRY(vkCreateDevice), ENTRY(vkQueueSubmit), ENTRY(vkQueueSubmit2),
    ENTRY(vkQueueSubmit2KHR), ENTRY(vkWaitForFences), ENTRY(vkGetFenceStatus), ENTRY(vkWaitSemaphores),
    ENTRY(vkWaitSemaphoresKHR), ENTRY(vkGetSemaphoreCounterValue), ENTRY(vkGetSemaphoreCounterValueKHR),
    ENTRY(vkDeviceWaitIdle), ENTRY(vkQueueWaitIdle), ENTRY(vkAllocateMemory), ENTRY(vkCreateComputePipelines),
};

static Function own(const char *name) {
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (!strcmp(name, entries[i].name)) return entries[i].function;
    return NULL;
}

static Function device_proc(Handle device, const char *name) {
    Function next = next_device_proc ? next_device_proc(device, name) : NULL;
    Function mine = own(name);
    return mine && next ? mine : next; /* what the driver lacks stays missing */
}

static Function instance_proc(Handle instance, const char *name) {
    Function mine = own(name);
    return mine ? mine : next_instance_proc ? next_instance_proc(instance, name) : NULL;
}

EXPORT Result vkNegotiateLoaderLayerInterfaceVersion(Negotiation *negotiation) {
    negotiation->version = 2;
    negotiation->instance_proc = instance_proc;
    negotiation->device_proc = device_proc;
    negotiation->physical_proc = NULL;
    return 0;
}
